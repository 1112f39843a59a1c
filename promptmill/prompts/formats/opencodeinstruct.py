"""nvidia/OpenCodeInstruct: all columns are text, scores and tests included; `input` is what is asked.

Rows are chosen by score with `where`, which reads the text as a number because it is told to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts.formats.row import Row, user_message
from promptmill.types import Message

COLUMNS = ("input",)
_OTHERS = ("output", "unit_tests", "average_test_score")


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, str) and all(name in row for name in _OTHERS)


def read(row: Row) -> list[list[Message]]:
    """Raises PromptRejected."""
    value, column = row.prompt(COLUMNS)
    if not isinstance(value, str):
        raise PromptRejected("not_text", f"{column} holds {type(value).__name__}, not text")
    return [[user_message(value)]]
