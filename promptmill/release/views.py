"""Views: the released tables, each with one explicit Arrow schema.

conversations  one row a conversation and sample, messages with `reasoning_content`; whole answers only
turns          one row a generated turn: input_ids = prompt + answer, loss_mask is 1 exactly on generated ids

What trainers read: SpecForge takes `conversations` (id, status "success", tools); speculators takes `turns`
(input_ids, loss_mask of equal length) as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from promptmill.chat import as_message
from promptmill.store.store import goes_on
from promptmill.types import NO_IDS, Answer, Message, PromptRow

_COMMON = [
    ("id", pa.string()),
    ("partition", pa.string()),
    ("prompt_hash", pa.string()),
    ("sample", pa.int32()),
    ("finish_reason", pa.string()),
    ("flags", pa.list_(pa.string())),
    ("prompt_tokens", pa.int64()),
    ("completion_tokens", pa.int64()),
    ("reasoning_tokens", pa.int64()),
    ("resumed_tokens", pa.int64()),
    ("model", pa.string()),
    ("model_revision", pa.string()),
    ("kv_dtype", pa.string()),
    ("server", pa.string()),
    ("created_at", pa.string()),
]
_ASKED = [
    ("mode", pa.string()),
    ("renderer", pa.string()),
    ("earlier_reasoning", pa.string()),
]
_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.large_string())])),
    ]
)
_MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.large_string()),
        ("reasoning_content", pa.large_string()),
        ("tool_calls", pa.list_(_CALL)),
        ("tool_call_id", pa.string()),
        ("name", pa.string()),
    ]
)
SCHEMAS: dict[str, pa.Schema] = {
    "conversations": pa.schema(
        [
            ("conversation_id", pa.string()),
            ("status", pa.string()),
            ("conversations", pa.list_(_MESSAGE)),
            ("tools", pa.large_string()),
            *_COMMON,
            *_ASKED,
        ]
    ),
    "turns": pa.schema(
        [
            ("turn", pa.int32()),
            ("input_ids", pa.large_list(pa.int32())),
            ("loss_mask", pa.large_list(pa.int8())),
            ("reasoning", pa.large_string()),
            ("content", pa.large_string()),
            *_COMMON,
            *_ASKED,
        ]
    ),
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Asked:
    """How the prompts of a partition were made."""

    partition: str
    mode: str
    """last_turn or rollout."""
    renderer: str
    """Fingerprint of tokenizer, template and its arguments, of which the prompt's ids are."""
    shows_reasoning: Callable[[Sequence[Message], Sequence[int]], str | None]
    """How much of the messages' reasoning a prompt shows: all, some, none; None where there is none."""


def rows_of(view: str, asked: Asked, prompt: PromptRow, answers: Mapping[str, Answer]) -> Iterator[Row]:
    """The rows that one input row gives in `view`; `answers` by prompt hash."""
    make = _conversation if view == "conversations" else _turns
    for sample, hashes in enumerate(prompt.prompt_hashes):
        chain = []
        for prompt_hash in hashes:
            answer = answers.get(prompt_hash)
            if answer is None or answer.status == "failed":
                break
            chain.append(answer)
            if not goes_on(answer.status):
                break
        if chain:
            yield from make(asked, prompt, sample, chain)


def _conversation(asked: Asked, prompt: PromptRow, sample: int, chain: list[Answer]) -> Iterator[Row]:
    """Only conversations that are whole: every turn answered, nothing flagged."""
    if len(chain) < len(prompt.turns) or any(answer.status != "answered" for answer in chain):
        return
    messages: list[Message] = []
    for turn, answer in zip(prompt.turns, chain, strict=True):
        messages += [*turn, as_message(answer)]
    common = _common(asked, prompt, sample, chain[-1], messages[:-1])
    yield {
        **common,
        "conversation_id": common["id"],
        "status": "success",
        "conversations": [_message(m) for m in messages],
        "tools": json.dumps(prompt.tools, ensure_ascii=False) if prompt.tools else None,
        "flags": sorted({flag for answer in chain for flag in answer.flags}),
        "completion_tokens": sum(a.completion_tokens for a in chain),
        "reasoning_tokens": sum(a.reasoning_tokens for a in chain),
        "resumed_tokens": sum(a.resumed_tokens for a in chain),
    }


def _turns(asked: Asked, prompt: PromptRow, sample: int, chain: list[Answer]) -> Iterator[Row]:
    """Every generated turn, truncated and flagged ones included: they are valid targets for a drafter.

    Answers without ids have none to train on.
    """
    messages: list[Message] = []
    for turn, answer in zip(prompt.turns, chain, strict=False):
        before = [*messages, *turn]
        messages = [*before, as_message(answer)]
        if NO_IDS in answer.flags:
            continue
        common = _common(asked, prompt, sample, answer, before)
        if len(prompt.turns) > 1:
            common["id"] += f"#turn{answer.turn}"
        yield {
            **common,
            "turn": answer.turn,
            "input_ids": [*answer.prompt_ids, *answer.output_ids],
            "loss_mask": [0] * len(answer.prompt_ids) + [1] * len(answer.output_ids),
            "reasoning": answer.reasoning,
            "content": answer.content or None,
        }


def _common(asked: Asked, prompt: PromptRow, sample: int, answer: Answer, messages: Sequence[Message]) -> Row:
    """`messages` are those that were rendered for this answer."""
    samples = len(prompt.prompt_hashes)
    return {
        "id": prompt.id if samples == 1 else f"{prompt.id}#{sample}",
        "partition": asked.partition,
        "mode": asked.mode,
        "renderer": asked.renderer,
        "earlier_reasoning": asked.shows_reasoning(messages, answer.prompt_ids)
        if answer.prompt_ids
        else None,
        "sample": sample,
        **{name: getattr(answer, name) for name, _ in _COMMON if name not in ("id", "partition", "sample")},
    }


def _message(message: Message) -> Row:
    calls = message.get("tool_calls")
    return {
        "role": message["role"],
        "content": message["content"],
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [_call(call) for call in calls] if isinstance(calls, list) else None,
        "tool_call_id": _text(message.get("tool_call_id")),
        "name": _text(message.get("name")),
    }


def _call(call: Any) -> Row:
    function = (call.get("function") or call) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    return {
        "id": _text(call.get("id")) if isinstance(call, dict) else None,
        "type": _text(call.get("type")) if isinstance(call, dict) else None,
        "function": {
            "name": _text(function.get("name")),
            "arguments": arguments
            if arguments is None or isinstance(arguments, str)
            else json.dumps(arguments, ensure_ascii=False),
        },
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
