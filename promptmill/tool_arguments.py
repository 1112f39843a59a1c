"""The arguments of earlier tool calls, in the form that a template wants.

In OpenAI's form they are JSON text. Many templates go through them as a mapping and fail on text, some write
them with `tojson` and would quote the text a second time, others join them as text and fail on a mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from promptmill.errors import PromptRejected
from promptmill.prompts.json_text import loads
from promptmill.types import Message

Form = Literal["as_given", "mapping", "text"]

_VALUE = "Oslo"
_MAPPING = {"city": _VALUE}
_TEXT = json.dumps(_MAPPING)
PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def form_of(render: Callable[[list[Message]], str]) -> Form | None:
    """What a template wants, by how it renders a call each way; None where it renders neither.

    `render` raises PromptRejected where the template raises.
    """
    as_text, as_mapping = _try(render, _TEXT), _try(render, _MAPPING)
    if as_text is None or as_mapping is None:
        if as_text is None and as_mapping is None:
            return None
        return "mapping" if as_text is None else "text"
    if _TEXT not in as_text:  # quoted twice, or gone through letter by letter
        return "mapping" if _VALUE in as_mapping else "as_given"
    return "text" if repr(_MAPPING) in as_mapping else "as_given"


def with_arguments(messages: Sequence[Message], form: Form | None) -> Sequence[Message]:
    """`messages` for the template; what is changed is copied. Raises PromptRejected for what is no JSON."""
    if form not in ("mapping", "text") or not any(message.get("tool_calls") for message in messages):
        return messages
    convert = _as_mapping if form == "mapping" else _as_text
    return [
        {**message, "tool_calls": [_call(call, convert) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _call(call: Mapping[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _call(function, convert)}
    return (
        {**call, "arguments": convert(str(call.get("name")), call["arguments"])}
        if "arguments" in call
        else {**call}
    )


def _as_mapping(name: str, arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise PromptRejected(
            "bad_tool_arguments",
            f"the template wants the arguments of {name} as a mapping, and they are no JSON: {error}",
        ) from None
    if not isinstance(value, dict):
        raise PromptRejected(
            "bad_tool_arguments",
            f"the template wants the arguments of {name} as a mapping, and they are {type(value).__name__}",
        )
    return value


def _as_text(_: str, arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments


def _try(render: Callable[[list[Message]], str], arguments: Any) -> str | None:
    # An id of nine letters and digits: Mistral's templates take no other.
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    try:
        return render(
            [
                {"role": "user", "content": "How is the weather?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": "Fine."},
            ]
        )
    except PromptRejected:
        return None
