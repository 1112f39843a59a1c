"""Reasons of rejects and names of notes: what the code gives, what has a remedy, what the docs say."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import ROOT

from promptmill.prompts.formats import FORMATS
from promptmill.prompts.policies import NOTES
from promptmill.prompts.reasons import REASONS, with_remedy
from promptmill.settings import PartitionSettings, PolicySettings

RENDERING = (ROOT / "promptmill" / "chat.py", ROOT / "promptmill" / "tool_arguments.py")
MODULES = [*(ROOT / "promptmill" / "prompts").rglob("*.py"), *RENDERING]
PAGE = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def calls(path: Path) -> Iterator[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def words(node: ast.expr) -> Iterator[str]:
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def table(heading: str) -> dict[str, str]:
    """The first two columns of the table that ends a section of the page."""
    section = PAGE.partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE)}


def test_every_reason_that_the_code_gives_has_a_remedy_and_every_remedy_a_reason() -> None:
    places = {"PromptRejected": 0, "Broken": 0, "Reject": 1}
    given = {
        word
        for path in MODULES
        for call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id in places
        for argument in call.args[places[call.func.id] :][:1]
        for word in words(argument)
        if re.fullmatch(r"[a-z_]+", word)
    }
    assert given == set(REASONS)
    assert with_remedy("too_long") == f"too_long ({REASONS['too_long']})"
    assert with_remedy("a server's own") == "a server's own"


def test_every_note_that_the_code_takes_has_a_meaning() -> None:
    taken = {
        word
        for path in MODULES
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "add"
        and isinstance(call.func.value, ast.Name | ast.Attribute)
        and "notes" in ast.unparse(call.func.value)
        for word in words(call.args[0])
        if "_" in word
    }
    assert taken - {"keep", "drop"} == set(NOTES)


@pytest.mark.parametrize(("heading", "expected"), [("reason", REASONS), ("count", NOTES)])
def test_page_has_the_same_words_as_the_code(heading: str, expected: dict[str, str]) -> None:
    assert table(heading) == expected


def test_page_has_every_format_and_every_policy_with_its_values() -> None:
    assert list(table("format")) == list(FORMATS)
    assert set(typing.get_args(PartitionSettings.model_fields["format"].annotation)) == {"auto", *FORMATS}
    values = {
        name: [str(info.default), *(v for v in typing.get_args(info.annotation) if v != info.default)]
        for name, info in PolicySettings.model_fields.items()
        if typing.get_origin(info.annotation) is typing.Literal
    }
    assert {name: re.findall(r"`(\w+)`", cell) for name, cell in table("policy").items()} == values
