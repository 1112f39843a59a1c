"""One row of a source becomes a conversation, or is rejected with a reason that can be counted.

messages  a list of {role, content, …}, or a list with such a list in it (several: one per turn)
text      one column, the user's only message
turns     a list of user turns, each answered on the answers before it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts.sources import RawRow, loads
from promptmill.settings import ColumnSettings
from promptmill.types import Conversation, Message

USUAL_PROMPTS = ("messages", "conversations", "turns", "prompt", "question", "text", "input", "instruction")
USUAL_IDS = ("id", "task_id", "question_id", "uuid", "conversation_id")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")


def choose_format(row: Mapping[str, Any], columns: ColumnSettings) -> str:
    """The format that fits the value in the prompt column.

    Raises PromptRejected where the column is there and empty, so that the next row may tell, and ConfigError
    where no format fits.
    """
    column = _prompt_column(row, columns)
    value = row.get(column) if column else None
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        return "turns" if all(isinstance(item, str) for item in value) else "messages"
    if column in row and value in (None, []):
        raise PromptRejected("no_messages", f"{column} is empty")
    raise ConfigError(
        f"no column with prompts was recognised among {', '.join(row) or 'none'}; "
        "set columns.prompt and format (messages, text or turns)."
    )


def to_conversation(row: RawRow, fmt: str, columns: ColumnSettings, mode: str | None) -> Conversation:
    """The conversation of `row`. Raises PromptRejected with the reason."""
    column = _prompt_column(row.data, columns)
    if not column or column not in row.data:
        wanted = columns.prompt or "/".join(USUAL_PROMPTS)
        raise PromptRejected("no_prompt", f"there is no column {wanted!r}")
    turns = _turns(row.data[column], fmt, column)
    if columns.system and (system := row.data.get(columns.system)):
        turns[0].insert(0, {"role": "system", "content": _content(system, columns.system, {})})
    if mode == "rollout" or (mode is None and fmt == "turns"):
        turns = _split_at_answers(turns)
    else:
        turns = [_last_turn([message for turn in turns for message in turn], column)]
    for turn in turns:
        _check_turn(turn)
    tools_column = columns.tools or "tools"
    return Conversation(
        id=_id(row, columns),
        turns=turns,
        tools=_tools(row.data.get(tools_column), tools_column),
        location=row.location,
    )


def _prompt_column(row: Mapping[str, Any], columns: ColumnSettings) -> str:
    return columns.prompt or next((name for name in USUAL_PROMPTS if name in row), "")


def _id(row: RawRow, columns: ColumnSettings) -> str:
    """The row's own id, or its place: `file:line` stays the same for as long as the file does."""
    names = (columns.id,) if columns.id else USUAL_IDS
    value = next((row.data[name] for name in names if row.data.get(name) not in (None, "")), None)
    return str(value) if isinstance(value, str | int) else row.location


def _turns(value: Any, fmt: str, column: str) -> list[list[Message]]:
    """What the prompt column says, as lists of messages, one a turn of the source."""
    if fmt == "text":
        if not isinstance(value, str):
            raise PromptRejected("not_text", f"{column} holds {type(value).__name__}, not text")
        return [[{"role": "user", "content": value}]]
    if fmt == "messages" and isinstance(value, str):
        value = _from_json(value, column)
    if not isinstance(value, list) or not value:
        raise PromptRejected("no_messages", f"{column} holds no list of {fmt}")
    if fmt == "turns":
        if not all(isinstance(item, str) for item in value):
            raise PromptRejected("not_text", f"{column} holds a turn that is not text")
        return [[{"role": "user", "content": item}] for item in value]
    if all(isinstance(item, list) for item in value):
        return [[_message(item, column) for item in turn] for turn in value]
    return [[_message(item, column) for item in value]]


def _message(item: Any, column: str) -> Message:
    if not isinstance(item, dict):
        raise PromptRejected("bad_message", f"{column} holds {type(item).__name__} where a message belongs")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise PromptRejected("unknown_role", f"role {role!r}; known: {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role], "content": _content(item.get("content"), column, item)}
    message.update({key: item[key] for key in KEPT if item.get(key) is not None})
    if not _are_calls(message.get("tool_calls", [])):
        raise PromptRejected(
            "bad_tool_calls", f"a message in {column} has tool_calls that are no list of calls"
        )
    return message


def _are_calls(calls: Any) -> bool:
    return isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function", {}), dict) for call in calls
    )


def _content(value: Any, column: str, item: Mapping[str, Any]) -> str:
    """Content as text; parts are joined by nothing, as they were one text. Raises PromptRejected."""
    if isinstance(value, str):
        return value
    if value is None:
        if item.get("tool_calls"):
            return ""
        raise PromptRejected("no_content", f"a message in {column} has no content and calls no tool")
    if isinstance(value, list):
        return "".join(_part(part) for part in value)
    raise PromptRejected("bad_content", f"content is {type(value).__name__}, not text")


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise PromptRejected("unsupported_modality", f"a content part of type {kind!r}; only text is answered")


def _tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form; a bare function schema is wrapped, nothing inside it is changed."""
    if isinstance(value, str):
        value = _from_json(value, column) if value.strip() else None
    if value in (None, []):
        return None
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise PromptRejected("bad_tools", f"{column} holds no list of functions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _from_json(text: str, column: str) -> Any:
    try:
        return loads(text)
    except ValueError as error:
        raise PromptRejected("bad_json", f"{column} is text and not JSON: {error}") from None


def _last_turn(messages: list[Message], column: str) -> list[Message]:
    """The conversation without its final assistant messages: they are what is answered anew."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not any(message["role"] in ("user", "tool") for message in messages[:end]):
        raise PromptRejected("nothing_to_answer", f"{column} holds no message that asks for an answer")
    return messages[:end]


def _split_at_answers(turns: Sequence[Sequence[Message]]) -> list[list[Message]]:
    """What stands before each answer of a rollout; the source's own answers are dropped."""
    split: list[list[Message]] = []
    for turn in turns:
        block: list[Message] = []
        for message in turn:
            if message["role"] != "assistant":
                block.append(message)
            elif block:
                split.append(block)
                block = []
        if block:
            split.append(block)
    if not split:
        raise PromptRejected("nothing_to_answer", "the conversation holds no message that asks for an answer")
    return split


def _check_turn(turn: Sequence[Message]) -> None:
    last = turn[-1]
    if last["role"] == "system":
        raise PromptRejected("nothing_to_answer", "a turn ends with the system's message")
    if last["role"] == "user" and not last["content"].strip():
        raise PromptRejected("empty_prompt", "the user's message is empty")
