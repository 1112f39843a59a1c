"""CPU seconds for every 1,000 answers of 300 tokens, beside a plain aiohttp loop on the same server.

    .venv/bin/python benchmarks/bench_client.py [--quick] [--memory]

Prints one JSON object. `ratio` is ours over the yardstick's in the same mode: both streamed, 32 tokens in an
event, or both whole; the median of rounds in which the two take turns. Ours is mill, client and store, every
answer split into texts and committed with fsync; sealing comes later and is told apart, and what of ours is
making text of ids, which the yardstick gets from the server, is `split_cpu_s_per_1000`. Server, yardstick and
ours are processes of their own. `memory` is the driver's, in MB: `rss_mb` when the run begins and when the
last prompts are in flight, before sealing, `rss_at_end_mb` behind it; --memory measures that alone. `imports`
is that of flows.regenerate, Prefect included.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ANSWERS_PER_S = 300
"""What the server gives: below what either client can take on one core, or events would arrive in heaps."""
QUICK = "--quick" in sys.argv
MEMORY_ALONE = "--memory" in sys.argv
WARM_UP = 1000
MEASURED = 1500 if QUICK else 4000
ROUNDS = 1 if QUICK else 3
MODES = [("stream", 150), ("stream", 1000), ("whole", 150), ("whole", 1000)][:: 3 if QUICK else 1]
MEMORY = (1000, 5_000 if QUICK else 100_000)
_IMPORTED = """
import sys
import flows.regenerate
from benchmarks.client.meter import rss_mb
import json
print(json.dumps({"rss_mb": round(rss_mb(), 1), "datasets": "datasets" in sys.modules}))
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = python("inputs", folder, WARM_UP + MEASURED, 512, "answers_300")
        parts = {"memory": memory(folder)} if MEMORY_ALONE else {**made, **every_part(folder)}
        load = [round(load, 2) for load in os.getloadavg()]
    print(json.dumps({"benchmark": "client", **parts, "load": load}, indent=1))


def every_part(folder: Path) -> dict[str, Any]:
    return {
        "modes": {
            f"{mode}, {in_flight} in flight": compare(folder, mode, in_flight) for mode, in_flight in MODES
        },
        "memory": memory(folder),
        "imports": json.loads(subprocess.check_output([sys.executable, "-c", _IMPORTED], cwd=ROOT)),
    }


def compare(folder: Path, mode: str, in_flight: int) -> dict[str, Any]:
    """The two in turn on one server."""
    prompts, manifest = folder / "answers_300-prompts.json", folder / "answers_300.json"
    plain, ours = [], []
    with serving(folder, in_flight / ANSWERS_PER_S) as url:
        for n in range(ROUNDS):
            out = folder / f"{mode}-{in_flight}-{n}"
            plain.append(python("yardstick", url, prompts, f"{out}.jsonl", in_flight, mode, WARM_UP))
            ours.append(python("ours", folder, manifest, url, in_flight, mode, WARM_UP, out))
    say(f"{mode}, {in_flight} in flight: {plain} {ours}")
    ratios = [b["cpu_s_per_1000"] / a["cpu_s_per_1000"] for a, b in zip(plain, ours, strict=True)]
    return {"ratio": round(statistics.median(ratios), 2), "yardstick": plain, "ours": ours}


def memory(folder: Path) -> dict[str, Any]:
    """Answers of four tokens, so that it is quick."""
    rss = {}
    with serving(folder, 0.05) as url:
        for prompts in MEMORY:
            name = f"memory_{prompts}"
            python("inputs", folder, prompts, 4, name)
            out = folder / f"{name}-store"
            one = python("ours", folder, folder / f"{name}.json", url, 150, "stream", 0, out)
            say(f"memory: {one}")
            rss[f"{prompts} prompts"] = {name: one[name] for name in ("rss_mb", "rss_at_end_mb")}
    low, high = rss.values()
    return {
        **rss,
        "growth_mb": round(high["rss_mb"][1] - low["rss_mb"][1], 1),
        "growth_at_end_mb": round(high["rss_at_end_mb"] - low["rss_at_end_mb"], 1),
    }


def say(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def python(part: str, *arguments: object) -> dict[str, Any]:
    """What a part prints."""
    command = [sys.executable, "-m", f"benchmarks.client.{part}", *map(str, arguments)]
    made: dict[str, Any] = json.loads(subprocess.check_output(command, cwd=ROOT))
    return made


@contextmanager
def serving(folder: Path, seconds: float) -> Iterator[str]:
    """The address of a server whose answers take `seconds` in the mean."""
    command = [sys.executable, "-m", "benchmarks.client.server"]
    command += [str(folder / "answers.json"), str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
