"""Prompts of 100 to 200 tokens and answers of 300, out of this repository's own prose.

    python -m benchmarks.client.inputs FOLDER PROMPTS MAX_NEW_TOKENS NAME

Writes FOLDER/NAME.json, a manifest, with FOLDER/NAME.parquet; FOLDER/NAME-prompts.json, the input ids alone;
FOLDER/answers.json; and the profile where it is not there yet.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.client.meter import cpu_s
from promptmill.chat import ChatRenderer
from promptmill.profile import load_profile
from promptmill.prompts import manifest as manifests
from promptmill.run import Run, RunRequest
from promptmill.types import Manifest, PromptRow
from tests.contract.sglang_place import ROOT, Engine, sim_model

ANSWER_TOKENS = 300
_THOUGHT = 100
_ANSWERS = 97


def main() -> None:
    folder, prompts, cap, name = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if not (folder / "profile.toml").exists():
        Engine(["true"], sim_model(folder)).write_profile(folder)
    run = Run.read(load_profile(str(folder / "profile.toml"), []), RunRequest())
    words = " ".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))).split()
    answers = [_answer(run.renderer, words, number) for number in range(_ANSWERS)]
    (folder / "answers.json").write_text(json.dumps(answers))
    (folder / f"{name}.json").write_text(json.dumps(write(folder, name, words, run, prompts, cap).to_json()))
    print(json.dumps({"split_cpu_s_per_1000": round(split_cost(run.renderer, answers), 3)}))


def write(folder: Path, name: str, words: list[str], run: Run, prompts: int, cap: int) -> Manifest:
    """The manifest that preparing these prompts would make, without a minute of rendering."""
    rng = random.Random(1)
    texts = [" ".join(words[at : at + rng.randint(40, 80)]) for at in rng.sample(range(len(words) - 80), 500)]
    known = [run.renderer.render([{"role": "user", "content": text}], None) for text in texts]
    path, ids = folder / f"{name}.parquet", []
    with pq.ParquetWriter(path, manifests._SCHEMA, compression="zstd") as writer:
        for start in range(0, prompts, 1000):
            rows = [_row(n, texts[n % 500], known[n % 500]) for n in range(start, min(prompts, start + 1000))]
            ids += [row.input_ids for row in rows] if prompts < 20_000 else []
            writer.write_batch(manifests._to_arrow(rows))
    (folder / f"{name}-prompts.json").write_text(json.dumps(ids))
    return Manifest(
        partition="A_text", key=name, path=str(path), rejects_path="", format="text", column="", rows=prompts,
        prompts=prompts, rejected={}, examples=[], notes={}, prompt_tokens=0,
        longest_prompt=max(map(len, known)),
        longest_request=max(map(len, known)) + cap,
        digest="", max_new_tokens=cap, identity={},
    )  # fmt: skip


def _row(number: int, text: str, ids: list[int]) -> PromptRow:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    turns = [[{"role": "user", "content": text}]]
    return PromptRow(number, str(number), f"a.jsonl:{number + 1}", turns, None, ids, [[digest]])


def _answer(renderer: ChatRenderer, words: list[str], number: int) -> dict[str, Any]:
    """Some thought, the marker that closes it, some content, and the token that ends it."""
    tokenizer: Any = renderer._tokenizer
    text = " ".join(words[number * 40 : number * 40 + 600])
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    ids = [*ids[:_THOUGHT], *renderer.markers.close, *ids[_THOUGHT:]][: ANSWER_TOKENS - 1]
    ids.append(tokenizer.eos_token_id)
    return {"ids": ids, "words": [tokenizer.decode([i]) for i in ids]}


def split_cost(renderer: ChatRenderer, answers: list[dict[str, Any]]) -> float:
    """CPU seconds to make text of 1,000 answers, reasoning and content; the yardstick does not do that."""
    prompt = [*range(10), *renderer.markers.open]
    before = cpu_s()
    for number in range(1000):
        renderer.split(prompt, answers[number % len(answers)]["ids"])
    return cpu_s() - before


if __name__ == "__main__":
    main()
