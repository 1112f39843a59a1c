"""Which ids open and close reasoning, by the model's family; resolved from its tokenizer.

A marker that is a token of its own is one id, and text that quotes it has other ids. A tokenizer that knows
such a token and splits it is of the wrong class, and refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptmill.errors import ConfigError
from promptmill.settings import ChatSettings


@dataclass(frozen=True, slots=True)
class Family:
    """How some models write reasoning, as text."""

    open: str
    close: str
    leaves_for: str = ""
    """A marker of a call that ends reasoning as well, and stays in the content."""
    answer: str = ""
    """Stands ahead of the content; what is between it and `close` belongs to neither."""
    field: str = "reasoning_content"
    """Where its template looks for the reasoning of a message."""
    told_by: tuple[str, ...] = ()
    """Tokens that a vocabulary of this family has."""


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        leaves_for="<|channel|>commentary",
        answer="<|channel|>final<|message|>",
        field="thinking",
        told_by=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ),
    "minimax_m3": Family("<mm:think>", "</mm:think>", told_by=("<mm:think>", "</mm:think>")),
    "kimi_k2": Family(
        "<think>",
        "</think>",
        leaves_for="<|tool_calls_section_begin|>",
        told_by=("<think>", "</think>", "<|tool_calls_section_begin|>"),
    ),
    "think": Family("<think>", "</think>", told_by=("<think>", "</think>")),
}
"""In the order in which `auto` tries them."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The same as ids. Without reasoning, all are empty."""

    family: str = "none"
    open: tuple[int, ...] = ()
    close: tuple[int, ...] = ()
    leaves_for: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    field: str = "reasoning_content"

    def __bool__(self) -> bool:
        return bool(self.open and self.close)


def find(ids: Sequence[int], wanted: Sequence[int], start: int = 0) -> int | None:
    """Where `wanted` begins in `ids`, from `start` on."""
    first, n = wanted[0], len(wanted)
    try:
        while True:
            start = ids.index(first, start)
            if n == 1 or list(ids[start : start + n]) == list(wanted):
                return start
            start += 1
    except ValueError:
        return None


def resolve(tokenizer: Any, settings: ChatSettings) -> Markers:
    """The markers of this model. Raises ConfigError where the tokenizer cannot be the one they belong to."""
    name, family = _family(tokenizer, settings)
    if family is None:
        if settings.reasoning_ids:
            raise ConfigError(f"chat.reasoning_ids names markers, and there are none: {_wrong(tokenizer)}.")
        return Markers()
    markers = Markers(
        name,
        _ids(tokenizer, family.open),
        _ids(tokenizer, family.close),
        _ids(tokenizer, family.leaves_for),
        _ids(tokenizer, family.answer),
        family.field,
    )
    if settings.reasoning_ids and [*markers.open, *markers.close] != settings.reasoning_ids:
        raise ConfigError(
            f"the reasoning markers {family.open!r} and {family.close!r} are the ids "
            f"{[*markers.open, *markers.close]}, chat.reasoning_ids says {settings.reasoning_ids}: "
            f"{_wrong(tokenizer)}."
        )
    return markers


def token_id(tokenizer: Any, text: str) -> int | None:
    """The one id of `text`, if it is a token of the vocabulary."""
    if not text:
        return None
    found = tokenizer.convert_tokens_to_ids(text)
    # A text that is unknown has the id of the unknown token.
    return int(found) if found is not None and tokenizer.convert_ids_to_tokens(found) == text else None


def _family(tokenizer: Any, settings: ChatSettings) -> tuple[str, Family | None]:
    """By the settings; else by the tokens that the vocabulary has."""
    if "" in (settings.reasoning_open, settings.reasoning_close) or settings.reasoning == "none":
        return "none", None
    name: str = settings.reasoning
    if name == "auto":
        name = next((n for n, f in FAMILIES.items() if _has(tokenizer, f.told_by)), "")
        if not (name or settings.reasoning_open or settings.reasoning_close or _spells_think(tokenizer)):
            return "none", None
    family = FAMILIES[name or "think"]
    if settings.reasoning_open or settings.reasoning_close:
        family = Family(
            settings.reasoning_open or family.open,
            settings.reasoning_close or family.close,
            family.leaves_for,
            family.answer,
            family.field,
        )
    return name or "think", family


def _has(tokenizer: Any, tokens: Sequence[str]) -> bool:
    return all(token_id(tokenizer, token) is not None for token in tokens)


def _spells_think(tokenizer: Any) -> bool:
    """Whether the markers, no tokens here, survive as text: a plain model is none the worse for them."""
    family = FAMILIES["think"]
    return all(_back(tokenizer, _encode(tokenizer, text)) == text for text in (family.open, family.close))


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The ids of a marker. Raises ConfigError where it does not survive a round trip."""
    if not text:
        return ()
    ids = _encode(tokenizer, text)
    back = _back(tokenizer, ids)
    if back != text:
        raise ConfigError(
            f"the reasoning marker {text!r} comes back from the tokenizer as {back!r}: {_wrong(tokenizer)}."
        )
    one = token_id(tokenizer, text)
    if one is not None and ids != (one,):
        raise ConfigError(
            f"the reasoning marker {text!r} is the token {one}, and the tokenizer makes {list(ids)} of it: "
            f"{_wrong(tokenizer)}."
        )
    return ids


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"])


def _back(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _wrong(tokenizer: Any) -> str:
    from transformers import __version__

    return (
        f"{type(tokenizer).__name__} of transformers {__version__} is not this model's tokenizer (see "
        "trust_remote_code), or these are not its markers (chat.reasoning, reasoning_open, reasoning_close, "
        "reasoning_ids)"
    )
