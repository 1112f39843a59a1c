"""Ids for calls of sources that have none, so that a result names the call that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable

from promptmill.types import Message


def number_calls(messages: Iterable[Message]) -> None:
    """Give calls and results without ids theirs, in order: `functions.NAME:N`.

    Most templates show no ids; Kimi's does, and its models expect this very form.
    """
    made = 0
    unanswered: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            for call in message.get("tool_calls", []):
                call.setdefault("id", f"functions.{call.get('function', {}).get('name', '')}:{made}")
                unanswered.append(call["id"])
                made += 1
        elif message["role"] == "tool" and unanswered:
            id_ = message.setdefault("tool_call_id", unanswered[0])
            if id_ in unanswered:
                unanswered.remove(id_)
