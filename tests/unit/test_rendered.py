"""A template that refuses rows: each is a reject with its words; where most are, it is the template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import make_preparation, user, write_lines
from test_chat import TAKE_TURNS

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.prompts.manifest import prepare
from promptmill.run import check_rendered
from promptmill.types import Manifest

GOOD = {"id": "r0", "messages": [user("one")]}
TWICE = {"id": "r1", "messages": [user("one"), user("two")]}
STARTS = {"id": "r2", "messages": [{"role": "assistant", "content": "I start"}, user("ok")]}


@pytest.fixture
def prepared(
    tmp_path: Path, renderer_of: Callable[[str], ChatRenderer]
) -> Callable[[list[object]], Manifest]:
    renderer = renderer_of(TAKE_TURNS)
    source = tmp_path / "a.jsonl"
    return lambda rows: prepare(make_preparation(write_lines(source, rows), renderer))


def test_rows_that_the_template_refuses_are_rejects_with_its_words(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared([GOOD, TWICE, GOOD, STARTS])
    assert (manifest.rows, manifest.prompts, manifest.rejected) == (4, 2, {"template_error": 2})
    assert manifest.examples[0].endswith("a.jsonl:2: template_error: roles have to take turns")
    check_rendered(manifest, 0.5)


def test_template_that_refuses_most_rows_ends_the_run_with_advice(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared([GOOD, TWICE, STARTS, "{"])
    check_rendered(manifest, 0.5)  # what is no JSON is not the template's fault
    with pytest.raises(
        ConfigError, match=r"(?s)2 template_error of 3 rows.*roles have to take turns.*chat\.te"
    ):
        check_rendered(prepared([GOOD, TWICE, STARTS]), 0.5)
    check_rendered(prepared([TWICE, STARTS]), 1.0)
    check_rendered(prepared([]), 0.0)
