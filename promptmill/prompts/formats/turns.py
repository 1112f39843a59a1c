"""A list of user messages, each asked on the answers before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts.formats.row import USUAL_PROMPTS, Row, user_message
from promptmill.types import Message


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


def read(row: Row) -> list[list[Message]]:
    """Raises PromptRejected."""
    value, column = row.prompt(USUAL_PROMPTS)
    if not isinstance(value, list) or not value:
        raise PromptRejected("no_messages", f"{column} holds no list of turns")
    if not all(isinstance(item, str) for item in value):
        raise PromptRejected("not_text", f"{column} holds a turn that is not text")
    return [[user_message(item)] for item in value]
