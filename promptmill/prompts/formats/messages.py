"""Lists of messages: OpenAI's {role, content, tool_calls, …}, and ShareGPT's {from, value} by translation.

A list may hold such lists, one a turn. The column may be JSON text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts.formats import sharegpt
from promptmill.prompts.formats.calls import number_calls
from promptmill.prompts.formats.row import USUAL_PROMPTS, Row, not_json, text_of
from promptmill.types import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""Known names of roles; a template is given the four that they stand for."""
KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    return isinstance(value, list) and any(not isinstance(item, str) for item in value)


def read(row: Row) -> list[list[Message]]:
    """The messages, one list a turn of the source. Raises PromptRejected."""
    value, column = row.prompt(USUAL_PROMPTS)
    if isinstance(value, str):
        value = row.from_json(value, column)
    return read_list(value, column, row)


def read_list(value: Any, column: str, row: Row) -> list[list[Message]]:
    if not isinstance(value, list) or not value:
        raise PromptRejected("no_messages", f"{column} holds no list of messages")
    source = value if all(isinstance(item, list) for item in value) else [value]
    turns = [[m for item in turn if (m := _message(item, column, row)) is not None] for turn in source]
    if any(isinstance(item, dict) and "from" in item for turn in source for item in turn):
        number_calls(message for turn in turns for message in turn)
    return turns


def _message(item: Any, column: str, row: Row) -> Message | None:
    """One message, or None where a policy leaves it out."""
    if not isinstance(item, dict):
        raise PromptRejected("bad_message", f"{column} holds {type(item).__name__} where a message belongs")
    if "from" in item and "role" not in item:
        item = sharegpt.as_openai(item, row)
    role = _role(item, row)
    if role is None:
        return None
    message: Message = {"role": role, "content": ""}
    message.update({key: item[key] for key in KEPT if item.get(key) is not None})
    if isinstance(item.get("function_call"), dict) and "tool_calls" not in message:  # OpenAI's older form
        message["tool_calls"] = [{"type": "function", "function": item["function_call"]}]
    _check_kept(message, column)
    content = text_of(item.get("content"), row)
    if content is None and not message.get("tool_calls"):
        if row.policies.empty_content == "drop":
            row.notes.add("empty_content_dropped")
            return None
        raise PromptRejected("no_content", f"a message in {column} has no content and calls no tool")
    message["content"] = content or ""
    return message


def _role(item: Mapping[str, Any], row: Row) -> str | None:
    role = item.get("role")
    known = {**ROLES, **row.policies.roles} if row.policies.roles else ROLES
    if isinstance(role, str) and role in known:
        return known[role]
    if row.policies.unknown_role == "drop":
        row.notes.add("unknown_role_dropped")
        return None
    raise PromptRejected("unknown_role", f"role {role!r}; known: {', '.join(known)}")


def _check_kept(message: Message, column: str) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    ):
        raise PromptRejected(
            "bad_tool_calls", f"a message in {column} has tool_calls that are no list of calls"
        )
    if problem := not_json(calls):
        raise PromptRejected("bad_tool_calls", f"a message in {column} has tool_calls with {problem}")
    for key in ("reasoning_content", "tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str | int):
            raise PromptRejected("bad_message", f"a message in {column} has a {key} that is no text")
