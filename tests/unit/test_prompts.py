"""Which prompts of a partition are pending, and in which order they are asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptmill.chat import ChatRenderer
from promptmill.generation.prompts import PromptMaker, Recorder
from promptmill.prompts.manifest import Preparation, prepare
from promptmill.reflag import rejudged
from promptmill.store.store import Store
from promptmill.types import Completion, Manifest, Prompt
from tests.helpers_store import MODEL, StubRenderer, answer, cut, keys_of, make_profile
from tests.unit.helpers import make_row, user, write_lines

RENDERER: Any = StubRenderer()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(make_profile(tmp_path))
    opened.open("test")
    yield opened
    opened.close()


def manifest_of(folder: Path, rows: list[list[dict[str, Any]]], samples: int = 1) -> Manifest:
    data = [{"id": f"r{n}", "messages": messages} for n, messages in enumerate(rows)]
    write_lines(folder / "P.jsonl", map(json.dumps, data))
    profile = make_profile(folder, sampling={"samples": samples})
    return prepare(Preparation(profile, profile.partition("P"), MODEL, RENDERER, folder / "m", None, None))


def pending(store: Store, manifest: Manifest) -> list[Prompt]:
    return list(PromptMaker(store, manifest, RENDERER, False, list).pending())


def test_pending_keeps_prompts_with_one_system_message_together(store: Store, tmp_path: Path) -> None:
    rows = [[{"role": "system", "content": f"s{n % 3}"}, user(f"q{n}")] for n in range(12)]
    rows += [[user(f"q{n}")] for n in range(12)]
    starts = [prompt.messages[0]["content"] for prompt in pending(store, manifest_of(tmp_path, rows))]
    assert len(starts) == 24
    for system in ("s0", "s1", "s2"):
        at = starts.index(system)
        assert starts[at : at + 4] == [system] * 4


def test_pending_keeps_samples_together_and_leaves_out_what_is_done(store: Store, tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, [[user(f"q{n}")] for n in range(8)], samples=3)
    done = keys_of(manifest)[5][1][0]
    store.put(answer(done)).result(10)
    prompts = pending(store, manifest)
    assert done not in {prompt.prompt_hash for prompt in prompts}
    rows = [prompt.row.id for prompt in prompts]
    assert rows == [row for row in dict.fromkeys(rows) for _ in range(2 if row == "r5" else 3)]
    assert rows != sorted(rows)


def test_row_with_less_room_is_asked_for_less_and_done_when_that_is_used_up(
    store: Store, tmp_path: Path
) -> None:
    write_lines(tmp_path / "P.jsonl", [{"prompt": "x" * n} for n in (10, 50, 80, 95)])
    policies = {"too_long": "shrink", "shrink_to_at_least": 20}
    part = {"name": "P", "source": str(tmp_path / "P.jsonl"), "policies": policies}
    profile = make_profile(tmp_path, partitions=[part])
    manifest = prepare(
        Preparation(profile, profile.partition("P"), MODEL, RENDERER, tmp_path / "m", None, 100)
    )
    assert (manifest.prompts, manifest.rejected, manifest.longest_request) == (3, {"too_long": 1}, 100)
    prompts = {len(prompt.input_ids): prompt for prompt in pending(store, manifest)}
    assert {length: prompt.max_new_tokens for length, prompt in prompts.items()} == {10: 64, 50: 50, 80: 20}

    store.put(cut(prompts[80].prompt_hash, 20)).result(10)
    store.put(cut(prompts[50].prompt_hash, 49)).result(10)
    store.put(cut(prompts[10].prompt_hash, 63)).result(10)
    counts = store.tally(manifest).to_json()
    assert {name: n for name, n in counts.items() if n} == {
        "rows": 4,
        "truncated": 1,
        "rejected": 1,
        "pending": 2,
    }
    assert {len(prompt.input_ids) for prompt in pending(store, manifest)} == {10, 50}


def test_answer_that_was_cut_for_want_of_room_says_so(renderer: ChatRenderer) -> None:
    recorder = Recorder(renderer, MODEL)
    for cap, flags in ((None, []), (3, ["shrunk"])):
        row = make_row(max_new_tokens=cap)
        prompt = Prompt("h0", "P", [1], 0, 0, 3, row, row.turns[0])
        completion = Completion([500, 600, 700], "length", 1)
        record = recorder.answered(prompt, completion, "life", "auto")
        assert record.flags == flags
        assert rejudged(record, renderer).flags == flags
