"""ShareGPT's messages, {from, value}: roles as in `messages`, and calls and results as JSON.

`function_call` (an object or a list of them: name, arguments) becomes an assistant's tool_calls, and
`observation` a tool's result, for the first call that has none yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts.formats.row import Row

CALLS = ("function_call", "tool_call")
RESULTS = ("observation", "function_response", "tool_response")


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) and "from" in item for item in value)


def as_openai(item: Mapping[str, Any], row: Row) -> dict[str, Any]:
    """The message with OpenAI's keys. Raises PromptRejected where a call is not JSON."""
    role, value = item["from"], item.get("value")
    if role in CALLS:
        return {"role": "assistant", "content": None, "tool_calls": _calls(value, row)}
    return {**item, "role": "tool" if role in RESULTS else role, "content": value}


def _calls(value: Any, row: Row) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = row.from_json(value, "function_call")
        except PromptRejected as error:
            raise PromptRejected("bad_tool_calls", error.detail) from None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        raise PromptRejected("bad_tool_calls", "a function_call names no function")
    return [{"type": "function", "function": call} for call in calls]
