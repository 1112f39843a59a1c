"""Reading, rendering, counting and hashing 1,319 prompts (as many as the gsm8k test set), after imports.

    python benchmarks/bench_plan.py [FILE.jsonl COLUMN]

Without a file, word problems of gsm8k's mean length are made up. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest

ROWS = 1319
ROOT = Path(__file__).resolve().parent.parent
WORDS = (
    "apples",
    "baskets",
    "day",
    "every",
    "farmer",
    "for",
    "half",
    "how",
    "many",
    "market",
    "sells",
    "the",
)


def made_up(path: Path) -> None:
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            words = [rng.choice(WORDS) if rng.random() > 0.1 else str(rng.randint(2, 99)) for _ in range(45)]
            file.write(json.dumps({"question": " ".join(words)}) + "\n")


def main() -> None:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as scratch:
        source, column = Path(scratch) / "prompts.jsonl", "question"
        if len(sys.argv) == 3:
            source, column = Path(sys.argv[1]), sys.argv[2]
        else:
            made_up(source)
        settings = [f"partitions.B4_math.source={source}", f"partitions.B4_math.columns.prompt={column}"]
        profile = load_profile("demo", [*settings, f"store.url={scratch}/store"])
        start = time.perf_counter()
        run = Run.read(profile, RunRequest(("B4_math",)))
        loaded = time.perf_counter()
        cpu = time.process_time()
        manifest = prepare(run.preparation("B4_math"))
        taken = time.perf_counter() - loaded
        print(
            json.dumps(
                {
                    "benchmark": "plan",
                    "rows": manifest.rows,
                    "tokens": manifest.prompt_tokens,
                    "tokenizer_s": round(loaded - start, 2),
                    "prepare_s": round(taken, 2),
                    "prepare_cpu_s": round(time.process_time() - cpu, 2),
                    "rows_per_s": round(manifest.rows / taken),
                    "load_1min": round(os.getloadavg()[0], 2),
                }
            )
        )


if __name__ == "__main__":
    main()
