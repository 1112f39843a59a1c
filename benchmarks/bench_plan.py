"""Reading, rendering, counting and hashing 88,000 prompts of 150M characters, beside what one writes by hand.

    .venv/bin/python benchmarks/bench_plan.py [--quick] [--data FOLDER]

By hand is `datasets.load_dataset` and `apply_chat_template`, row by row, on the same rows. Each runs in a
process of its own, whose highest memory is told; times are without imports and loading the tokenizer.
--quick takes a twentieth of the rows. Without a FOLDER (see plan_rows.py) they are made up. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHORT, AGENT = 83_700, 4_300
QUICK = 20
PROFILE = """
model = "embedded:smollm2"
[server]
engine = "openai"
urls = ["http://127.0.0.1:9"]
[chat]
template = "{template}"
[store]
url = "{folder}/store"
[[partitions]]
name = "short"
source = "{folder}/short.jsonl"
[[partitions]]
name = "agent"
source = "{folder}/agent.jsonl"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(CHILDREN[args.child](args.folder)))
        return
    from benchmarks.plan_rows import write_rows

    by = QUICK if args.quick else 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        template = ROOT / "deployments" / "demo" / "chat_template.jinja"
        (folder / "profile.toml").write_text(
            PROFILE.format(template=template, folder=folder), encoding="utf-8"
        )
        characters = write_rows(folder, SHORT // by, AGENT // by, args.data)
        result = {
            "benchmark": "plan",
            "rows": SHORT // by + AGENT // by,
            "characters": characters,
            "load_1min": round(os.getloadavg()[0], 2),
            **{child: _run(child, folder) for child in CHILDREN},
        }
    print(json.dumps(result, indent=1))


def _run(child: str, folder: Path) -> Any:
    command = [sys.executable, __file__, "--child", child, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return json.loads(done.stdout)


def promptmill_plan(folder: Path) -> dict[str, Any]:
    from promptmill.prompts.manifest import prepare
    from promptmill.run import Run, RunRequest

    run = Run.read(_profile(folder), RunRequest())
    return _measured(lambda name: prepare(run.preparation(name)).prompt_tokens)


def by_hand(folder: Path) -> dict[str, Any]:
    from datasets import disable_progress_bars, load_dataset

    from promptmill.run import Run, RunRequest

    disable_progress_bars()
    profile = _profile(folder)
    tokenizer: Any = Run.read(profile, RunRequest()).renderer._tokenizer
    template = Path(profile.chat.template).read_text(encoding="utf-8")

    def tokens(name: str) -> int:
        rows = load_dataset(
            "json", data_files=str(folder / f"{name}.jsonl"), split="train", cache_dir=str(folder)
        )
        count = 0
        for row in rows:
            said = row.get("messages") or [{"role": "user", "content": row["question"]}]
            ids = tokenizer.apply_chat_template(
                said, chat_template=template, add_generation_prompt=True, return_dict=False
            )
            count += len(ids)
        return count

    return _measured(tokens)


def _profile(folder: Path) -> Any:
    from promptmill.profile import load_profile

    return load_profile(str(folder / "profile.toml"))


def _measured(prepare: Callable[[str], int]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name in ("short", "agent"):
        start, cpu = time.perf_counter(), time.process_time()
        tokens = prepare(name)
        taken, cpu = time.perf_counter() - start, time.process_time() - cpu
        result |= {f"{name}_s": round(taken, 1), f"{name}_cpu_s": round(cpu, 1), f"{name}_tokens": tokens}
    rows = sum(1 for _ in (Path(sys.argv[-1]) / "short.jsonl").open("rb"))
    return {
        "short_rows_per_s": round(rows / result["short_s"]),
        "agent_tokens_per_s": round(result["agent_tokens"] / result["agent_s"]),
        **result,
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


CHILDREN: dict[str, Callable[[Path], dict[str, Any]]] = {"promptmill": promptmill_plan, "by_hand": by_hand}


if __name__ == "__main__":
    main()
