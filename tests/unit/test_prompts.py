"""Which prompts of a partition are pending, and in which order they are asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from promptmill.generation.prompts import PromptMaker
from promptmill.prompts.manifest import Preparation, prepare
from promptmill.store.store import Store
from promptmill.types import Manifest, Prompt
from tests.helpers_store import MODEL, StubRenderer, answer, keys_of, make_profile
from tests.unit.helpers import user, write_lines

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
