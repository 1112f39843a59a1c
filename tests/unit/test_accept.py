"""A change of profile that would ask answered rows again is stopped before anything has changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers import MODEL, make_answer, make_profile, write_lines

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.prompts.manifest import load_current, prepare, read_keys
from promptmill.run import Run, RunRequest
from promptmill.store.store import Store
from promptmill.types import Manifest

ROWS = 40


@contextmanager
def opened(folder: Path, renderer: ChatRenderer, request: RunRequest, **profile: Any) -> Iterator[Run]:
    table = {"name": "A", "source": str(folder / "a.jsonl")}
    settings = make_profile(partitions=[table], store={"url": str(folder / "store")}, **profile)
    store = Store(settings)
    store.open("test")
    try:
        yield Run(settings, request, MODEL, renderer, store)
    finally:
        store.close()


@pytest.fixture
def answered(tmp_path: Path, renderer: ChatRenderer) -> Manifest:
    """All rows but the last have answers."""
    write_lines(tmp_path / "a.jsonl", [{"prompt": f"What is {n} + {n}?"} for n in range(ROWS)])
    with opened(tmp_path, renderer, RunRequest()) as run:
        manifest = prepare(run.preparation("A"))
        run.accept([manifest])
        hashes = [key for samples in read_keys(manifest) for chain in samples for key in chain]
        for prompt_hash in hashes[:-1]:
            run.store.put(make_answer(prompt_hash)).result(10)
    return manifest


def test_change_that_would_ask_answered_rows_again_is_refused_and_named(
    answered: Manifest, renderer: ChatRenderer, tmp_path: Path
) -> None:
    with opened(tmp_path, renderer, RunRequest(), sampling={"temperature": 0.5}) as run:
        manifest = prepare(run.preparation("A"))
        words = (
            rf"{ROWS - 1} of {ROWS - 1} answered rows .* because of: sampling.temperature. .*--accept-redo"
        )
        with pytest.raises(ConfigError, match=words):
            run.accept([manifest])
        assert load_current(run.store.manifests, "A") == answered


def test_change_is_taken_where_it_is_accepted(
    answered: Manifest, renderer: ChatRenderer, tmp_path: Path
) -> None:
    request = RunRequest(accept_redo=True)
    with opened(tmp_path, renderer, request, sampling={"temperature": 0.5}) as run:
        manifest = prepare(run.preparation("A"))
        run.accept([manifest])
        assert run.tally([manifest])[0].pending == ROWS


def test_more_room_for_answers_asks_no_finished_row_again(
    answered: Manifest, renderer: ChatRenderer, tmp_path: Path
) -> None:
    with opened(tmp_path, renderer, RunRequest(), classes={"short": {"max_new_tokens": 9_000}}) as run:
        manifest = prepare(run.preparation("A"))
        run.accept([manifest])
        assert run.tally([manifest])[0].pending == 1
