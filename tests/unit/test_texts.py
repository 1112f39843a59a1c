"""Answers without ids, taken apart by their text."""

from __future__ import annotations

import pytest

from promptmill.generation.texts import split_texts
from promptmill.types import Texts

THINK = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("reasoning", "content", "cut", "opened", "wanted"),
    [
        pytest.param("2 and 2.", "4", False, True, ("2 and 2.", "4", []), id="server-splits"),
        pytest.param("2 and", "", True, True, ("2 and", "", []), id="server-splits-and-it-was-cut"),
        pytest.param("", "2 and 2.\n</think>\n\n4", False, True, ("2 and 2.", "4", []), id="prompt-opened"),
        pytest.param(
            "", "<think>\n2 and 2.</think>4", False, False, ("2 and 2.", "4", []), id="model-opened"
        ),
        pytest.param("", "<think>2 and", True, False, ("2 and", "", ["reasoning_never_closed"]), id="open"),
        pytest.param("", "2 and", True, True, ("2 and", "", ["reasoning_never_closed"]), id="opened-and-cut"),
        # A server that splits, and a model that closed at once, would look the same.
        pytest.param("", "4", False, True, ("", "4", ["reasoning_never_closed"]), id="opened-and-stopped"),
        pytest.param("", "4 </think> 5", False, False, ("", "4 </think> 5", []), id="a-marker-by-chance"),
        pytest.param("", "4", False, False, ("", "4", []), id="no-reasoning"),
        pytest.param("", "", False, True, ("", "", []), id="nothing"),
    ],
)
def test_texts_are_split(
    reasoning: str, content: str, cut: bool, opened: bool, wanted: tuple[str, str, list[str]]
) -> None:
    split = split_texts(Texts(reasoning, content, 9, 0, False), cut, opened, THINK)
    assert (split.reasoning, split.content, split.flags) == wanted


def test_without_markers_all_is_content() -> None:
    split = split_texts(Texts("", "<think>a</think>b", 9, 0, False), False, False, ("", ""))
    assert (split.reasoning, split.content) == ("", "<think>a</think>b")


def test_calls_that_the_server_took_out_are_flagged() -> None:
    assert split_texts(Texts("", "", 9, 0, True), False, False, THINK).flags == ["tool_calls_lost"]
