"""Glaive's function-calling transcripts: raw text with roles in capitals.

v2  `system` and `chat`: a role stands at the start of a line behind an empty one
v1  one column, `sample`, that starts with the system's text: a role stands at the start of a line

Functions come out of the system's text as tools; a `<functioncall>` becomes a tool call, whose arguments are
JSON in single quotes, apostrophes in it as they come. Empty turns of the assistant are left out. White space
around a turn belongs to the transcript. What cannot be taken apart whole is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.prompts import json_text
from promptmill.prompts.formats.calls import number_calls
from promptmill.prompts.formats.row import Row, not_json
from promptmill.types import Message

COLUMNS = ("chat", "sample")
CALL = "<functioncall>"
END = "<|endoftext|>"

_ROLES = r"(USER|ASSISTANT|FUNCTION RESPONSE):"
_V2 = re.compile(rf"(?:\A\s*|\n[ \t]*\n[ \t]*|<\|endoftext\|>\s*){_ROLES}")
_V1 = re.compile(rf"(?:\A\s*|\n|<\|endoftext\|>\s*){_ROLES}")
_TRANSCRIPT = re.compile(r"\s*(SYSTEM|USER|ASSISTANT):(?s:.*)^ASSISTANT:", re.MULTILINE)
_FUNCTION = re.compile(r"^[ \t]*(?=\{)", re.MULTILINE)
_NEXT_FUNCTION = re.compile(r"[\s,]*(?=\{)")
_QUOTED_CALL = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*\'(.*)\'\s*\}', re.DOTALL
)
_decoder = json.JSONDecoder()


def fits(value: Any, row: Mapping[str, Any]) -> bool:
    """Whether `value` (of `chat` or `sample`) is a transcript: a role at its start, an answer behind."""
    return isinstance(value, str) and bool(_TRANSCRIPT.match(value))


def read(row: Row) -> tuple[list[list[Message]], list[dict[str, Any]]]:
    """The messages as one turn, and the functions of the system's text. Raises PromptRejected."""
    text, column = row.prompt(COLUMNS)
    if not isinstance(text, str):
        raise PromptRejected("not_text", f"{column} holds {type(text).__name__}, not text")
    system = row.data.get(row.columns.system or "system")
    marker = _V2
    if text.lstrip().startswith("SYSTEM:"):
        marker = _V1
        first = marker.search(text)
        system, text = (text[: first.start()], text[first.start() :]) if first else (text, "")
    prose, functions = _system(system)
    functions, replaced = json_text.clean(functions)
    if replaced:
        row.note_surrogates()
    messages: list[Message] = [{"role": "system", "content": prose}] if prose else []
    messages += _turns(text, marker, row)
    for message in messages:
        if END in message["content"] or CALL in message["content"]:
            raise PromptRejected("bad_transcript", f"a turn of the {message['role']} holds a marker inside")
    number_calls(messages)
    return [messages], functions


def _system(text: Any) -> tuple[str, list[dict[str, Any]]]:
    """The system's text without its functions, and these: objects with a name, at the start of a line."""
    if not isinstance(text, str):
        if text is None:
            return "", []
        raise PromptRejected("not_text", f"the system's text is {type(text).__name__}")
    text = text.strip().removeprefix("SYSTEM:").strip()
    prose, functions, at = "", [], 0
    while found := _FUNCTION.search(text, at):
        value, end = _decoded(text, found.end())
        if "name" not in value:  # an example, or the like
            prose, at = prose + text[at:end], end
            continue
        prose += text[at : found.start()]
        functions.append(value)
        while following := _NEXT_FUNCTION.match(text, end):
            value, end = _decoded(text, following.end())
            functions.append(value)
        at = end
    return (prose + text[at:]).strip(), functions


def _decoded(text: str, at: int) -> tuple[dict[str, Any], int]:
    try:
        value, end = _decoder.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise PromptRejected(
            "bad_tools", f"the system's text holds a function that is no JSON: {error}"
        ) from None
    if problem := not_json(value):
        raise PromptRejected("bad_tools", f"the system's text holds {problem}")
    return value, end


def _turns(text: str, marker: re.Pattern[str], row: Row) -> Iterator[Message]:
    ahead, *parts = marker.split(text)
    if ahead.strip():
        raise PromptRejected("bad_transcript", "the transcript does not start with a role")
    called = False
    for role, said in zip(parts[::2], parts[1::2], strict=True):
        said = said.strip().removesuffix(END).strip()
        if role == "USER":
            yield {"role": "user", "content": said}
        elif role == "FUNCTION RESPONSE":
            if not called:
                raise PromptRejected("bad_transcript", "a function's response comes before any call")
            yield {"role": "tool", "content": said}
        elif CALL in said:
            called = True
            yield _calling(said)
        elif said:
            yield {"role": "assistant", "content": said}
        else:
            row.notes.add("empty_answer_dropped")


def _calling(said: str) -> Message:
    content, *calls = said.split(CALL)
    return {
        "role": "assistant",
        "content": content.strip(),
        "tool_calls": [
            {"type": "function", "function": _call(text.replace(END, "").strip())} for text in calls
        ],
    }


def _call(text: str) -> dict[str, Any]:
    """Name and arguments, these as the JSON text that stands there."""
    try:
        call = json_text.loads(text)
    except ValueError:
        call = _quoted_call(text)
    arguments = call.get("arguments", "{}") if isinstance(call, dict) else None
    if isinstance(arguments, dict):
        arguments = json_text.dumps(arguments)
    if not isinstance(arguments, str) or not isinstance(call.get("name"), str):
        raise PromptRejected("bad_tool_calls", f"no call of a function: {text[:80]}")
    return {"name": call["name"], "arguments": arguments}


def _quoted_call(text: str) -> dict[str, Any]:
    """A call whose arguments stand in single quotes: they end at the last one."""
    found = _QUOTED_CALL.fullmatch(text)
    if not found:
        raise PromptRejected("bad_tool_calls", f"no call of a function: {text[:80]}")
    name, arguments = found.groups()
    for attempt in (arguments, arguments.replace(r"\'", "'")):
        try:
            if isinstance(json_text.loads(attempt), dict):
                return {"name": json_text.loads(name), "arguments": attempt}
        except ValueError:
            continue
    raise PromptRejected("bad_tool_calls", f"arguments that are no JSON object: {arguments[:80]}")
