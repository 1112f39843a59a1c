"""One column of text, the user's only message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts.formats.row import USUAL_PROMPTS, Row, user_message
from promptmill.types import Message


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, str)


def read(row: Row) -> list[list[Message]]:
    """Raises PromptRejected."""
    value, column = row.prompt(USUAL_PROMPTS)
    if not isinstance(value, str):
        raise PromptRejected("not_text", f"{column} holds {type(value).__name__}, not text")
    return [[user_message(value)]]
