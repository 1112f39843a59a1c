"""How long `promptmill --help` and `promptmill status` take, from the command to its end. Prints JSON."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 5


def seconds(*arguments: str) -> float:
    """Median wall time of a command, after one run that fills the caches."""
    taken = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        subprocess.run(
            [str(Path(sys.executable).parent / "promptmill"), *arguments], capture_output=True, check=True
        )
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken[1:]), 3)


def main() -> None:
    print(
        json.dumps(
            {
                "benchmark": "start",
                "help_s": seconds("--help"),
                "status_s": seconds("status", "demo"),
                "load_1min": round(os.getloadavg()[0], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
