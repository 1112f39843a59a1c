"""What is done with conversations that are not as one would wish. Pure.

Each policy is a setting with a default (`settings.PolicySettings`), and what it did to a row is noted under
one of the names in NOTES, so that a plan can count it. docs/formats.md has the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.settings import PolicySettings
from promptmill.types import Message

NOTES = {
    "last_assistant_dropped": "the last answer was dropped, to be given anew",
    "empty_content_dropped": "a message without content was left out",
    "empty_answer_dropped": "an empty turn of a transcript's assistant was left out",
    "unknown_role_dropped": "a message of an unknown role was left out",
    "orphan_tool_kept": "a tool's result answers no call, and was kept",
    "orphan_tool_dropped": "a tool's result that answers no call was left out",
    "same_role_kept": "messages of one role follow each other, and were kept as they are",
    "same_role_merged": "consecutive messages of one role were joined",
    "system_not_first_kept": "a system message stands behind the start, and was kept there",
    "modality_dropped": "an image, a sound or the like was left out",
    "control_tokens_kept": "text holds tokens for control, and was kept",
    "surrogates_replaced": "half of a surrogate pair became U+FFFD",
    "nul_kept": "text holds a NUL character, and was kept",
    "nul_dropped": "a NUL character was left out",
    "too_long_shrunk": "max_new_tokens was lowered to what the context has room for",
    "duplicate_joined": "asks what an earlier row asks, and shares its answer",
}
"""What a row may be counted under besides its end; a row stands under a name once."""


def apply(
    source: Sequence[Sequence[Message]], rollout: bool, policies: PolicySettings, notes: set[str]
) -> list[list[Message]]:
    """What is said before each answer. Raises PromptRejected."""
    turns = [list(turn) for turn in source]
    _nul(turns, policies, notes)
    if policies.empty_content == "drop":
        turns = [_without_empty(turn, notes) for turn in turns]
    turns = _without_orphans(turns, policies, notes)
    if rollout:
        turns = _split_at_answers(turns)
    else:
        turns = [_last_turn([message for turn in turns for message in turn], policies, notes)]
    turns = [_same_role(turn, policies, notes) for turn in turns]
    _system_first(turns, policies, notes)
    for turn in turns:
        _check_turn(turn)
    return turns


def _last_turn(messages: list[Message], policies: PolicySettings, notes: set[str]) -> list[Message]:
    """The conversation without its final assistant messages: they are what is answered anew."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not any(message["role"] in ("user", "tool") for message in messages[:end]):
        raise PromptRejected("nothing_to_answer", "the conversation holds no message that asks for an answer")
    if end < len(messages):
        if policies.last_assistant == "reject":
            raise PromptRejected("last_is_assistant", "the conversation ends with the assistant's turn")
        notes.add("last_assistant_dropped")
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


def _without_empty(turn: list[Message], notes: set[str]) -> list[Message]:
    """Leaves the last message that asks alone: a prompt is not to become another one in silence."""
    asks = max((i for i, message in enumerate(turn) if message["role"] == "user"), default=-1)
    kept = [
        message
        for i, message in enumerate(turn)
        if i == asks or message["role"] == "tool" or message["content"].strip() or message.get("tool_calls")
    ]
    if len(kept) < len(turn):
        notes.add("empty_content_dropped")
    return kept


def _without_orphans(
    turns: list[list[Message]], policies: PolicySettings, notes: set[str]
) -> list[list[Message]]:
    """A result that names no call is taken for the one before it; so is any where calls have no ids."""
    if not any(message.get("tool_call_id") is not None for turn in turns for message in turn):
        return turns
    made: set[Any] = set()

    def is_orphan(message: Message) -> bool:
        if message["role"] == "assistant":
            made.update(str(call.get("id")) for call in message.get("tool_calls", []))
        id_ = message.get("tool_call_id")
        return message["role"] == "tool" and id_ is not None and str(id_) not in made and "None" not in made

    kept = []
    for turn in turns:
        orphans = [is_orphan(message) for message in turn]
        if any(orphans):
            if policies.orphan_tool == "reject":
                id_ = turn[orphans.index(True)]["tool_call_id"]
                raise PromptRejected(
                    "orphan_tool_result", f"a tool's result for {id_!r}, which was not called"
                )
            notes.add("orphan_tool_kept" if policies.orphan_tool == "keep" else "orphan_tool_dropped")
            if policies.orphan_tool == "drop":
                turn = [message for message, orphan in zip(turn, orphans, strict=True) if not orphan]
        kept.append(turn)
    return kept


def _same_role(turn: list[Message], policies: PolicySettings, notes: set[str]) -> list[Message]:
    if not any(_are_alike(one, other) for one, other in pairwise(turn)):
        return turn
    if policies.same_role == "reject":
        raise PromptRejected("same_role_twice", "two messages of one role follow each other")
    if policies.same_role == "keep":
        notes.add("same_role_kept")
        return turn
    notes.add("same_role_merged")
    merged = [turn[0]]
    for message in turn[1:]:
        merged[-1:] = (
            [_joined(merged[-1], message)] if _are_alike(merged[-1], message) else [merged[-1], message]
        )
    return merged


def _are_alike(one: Message, other: Message) -> bool:
    return one["role"] == other["role"] != "tool" and one.get("name") == other.get("name")


def _joined(one: Message, other: Message) -> Message:
    both = {**one, **other}
    for key in ("content", "reasoning_content"):
        texts = [str(message[key]) for message in (one, other) if message.get(key)]
        if texts or key in both:
            both[key] = "\n\n".join(texts)
    if "tool_calls" in both:
        both["tool_calls"] = [*one.get("tool_calls", []), *other.get("tool_calls", [])]
    return both


def _system_first(turns: Iterable[Sequence[Message]], policies: PolicySettings, notes: set[str]) -> None:
    """Several system messages may stand at the start."""
    begun = False
    for turn in turns:
        for message in turn:
            if message["role"] != "system":
                begun = True
            elif begun:
                if policies.system_not_first == "reject":
                    raise PromptRejected("system_not_first", "a system message stands behind the start")
                notes.add("system_not_first_kept")


def _nul(turns: Iterable[Iterable[Message]], policies: PolicySettings, notes: set[str]) -> None:
    for turn in turns:
        for message in turn:
            if "\0" not in message["content"]:
                continue
            if policies.nul == "reject":
                raise PromptRejected("nul", f"the {message['role']}'s message holds a NUL character")
            notes.add("nul_kept" if policies.nul == "keep" else "nul_dropped")
            if policies.nul == "drop":
                message["content"] = message["content"].replace("\0", "")
