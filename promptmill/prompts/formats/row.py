"""What the formats share: a row with its settings, and the parts of a message, read as what they must be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts import json_text
from promptmill.settings import ColumnSettings, PolicySettings
from promptmill.types import Message

USUAL_PROMPTS = (
    "messages",
    "conversations",
    "turns",
    "prompt",
    "question",
    "text",
    "input",
    "instruction",
    "conversation",
)
USUAL_IDS = ("id", "task_id", "question_id", "uuid", "conversation_id")
TEXT_PARTS = ("text", "input_text", "output_text")
_DEEPEST = 400
"""Levels of nesting; templates and encoders recurse into what they are given."""


@dataclass(slots=True)
class Row:
    """One row of a source while it is read."""

    data: Mapping[str, Any]
    location: str
    columns: ColumnSettings
    policies: PolicySettings
    notes: set[str] = field(default_factory=set)
    """Names of what a policy did to it; see `policies.NOTES`."""

    def column(self, usual: Iterable[str]) -> str:
        """The prompt's column: as set, or the first usual one that the row has, or ""."""
        return self.columns.prompt or next((name for name in usual if name in self.data), "")

    def prompt(self, usual: Iterable[str]) -> tuple[Any, str]:
        """The prompt's value and its column. Raises PromptRejected where there is none."""
        usual = tuple(usual)
        column = self.column(usual)
        if not column or column not in self.data:
            wanted = self.columns.prompt or "/".join(usual)
            raise PromptRejected("no_prompt", f"there is no column {wanted!r}")
        return self.data[column], column

    def id(self) -> str:
        """The row's own id, or its place: `file:line` stays the same for as long as the file does."""
        names = (self.columns.id,) if self.columns.id else USUAL_IDS
        value = next((self.data[name] for name in names if self.data.get(name) not in (None, "")), None)
        return str(value) if isinstance(value, str | int) else self.location

    def from_json(self, text: str, column: str) -> Any:
        """The value of a column that holds JSON as text. Raises PromptRejected."""
        try:
            value, replaced = json_text.parse(text)
        except ValueError as error:
            raise PromptRejected("bad_json", f"{column} is text and not JSON: {error}") from None
        if replaced:
            self.note_surrogates()
        return value

    def note_surrogates(self) -> None:
        if self.policies.surrogates == "reject":
            raise PromptRejected("lone_surrogate", "half of a surrogate pair, which no text can hold")
        self.notes.add("surrogates_replaced")


def text_of(value: Any, row: Row) -> str | None:
    """Content as text, its parts joined by nothing, as they were one; None where there is none.

    Raises PromptRejected for what is no text.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, row) for part in value)
    raise PromptRejected("bad_content", f"content is {type(value).__name__}, not text")


def _part(part: Any, row: Row) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PromptRejected("bad_content", f"a content part is {type(part).__name__} without a type")
    if kind in TEXT_PARTS:
        if not isinstance(part.get("text"), str):
            raise PromptRejected("bad_content", "a content part of text holds none")
        return str(part["text"])
    if row.policies.unsupported_modality == "drop":
        row.notes.add("modality_dropped")
        return ""
    raise PromptRejected("unsupported_modality", f"a content part of type {kind!r}; only text is answered")


def tools_of(value: Any, column: str, row: Row) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form; a bare function schema is wrapped, nothing inside it is changed."""
    if isinstance(value, str):
        value = row.from_json(value, column) if value.strip() else None
    if value in (None, []):
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptRejected("bad_tools", f"{column} holds no list of functions")
    if problem := not_json(value):
        raise PromptRejected("bad_tools", f"{column} holds {problem}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def not_json(value: Any) -> str:
    """What in `value` is no JSON, in words, or "". (Parquet has dates, and parsers take NaN.)"""
    level = [value]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.values()
                if not all(isinstance(key, str) for key in item):
                    return "a key that is not text"
            elif isinstance(item, list | tuple):
                below += item
            elif isinstance(item, float):
                if not math.isfinite(item):
                    return f"{item}, which is no number"
            elif not (item is None or isinstance(item, str | int)):
                return f"a value of type {type(item).__name__}"
        if not below:
            return ""
        level = below
    return f"values more than {_DEEPEST} levels deep"


def user_message(text: str) -> Message:
    return {"role": "user", "content": text}
