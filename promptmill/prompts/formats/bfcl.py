"""The Berkeley Function Calling Leaderboard, and what looks like it.

`question` is a list of turns, each a list of messages; `function` lists bare schemas. They are passed on as
they are, with their `"type": "dict"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.prompts.formats import messages
from promptmill.prompts.formats.row import Row
from promptmill.types import Message

COLUMNS = ("question",)
TOOLS = "function"


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    nested = isinstance(value, list) and bool(value) and all(isinstance(item, list) for item in value)
    return nested and TOOLS in row


def read(row: Row) -> list[list[Message]]:
    """Raises PromptRejected."""
    value, column = row.prompt(COLUMNS)
    if isinstance(value, str):
        value = row.from_json(value, column)
    return messages.read_list(value, column, row)
