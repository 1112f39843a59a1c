"""An answer's ids become reasoning and content; reasoning ends at the first ids of its closing marker.

Text is derived, and can be derived anew from the ids of prompt and answer at any time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from promptmill.decoding import make_decoder
from promptmill.markers import Markers, find
from promptmill.types import LEFT_FOR_CALL

_SPACE = 4
"""Ids of white space that may stand between a marker and the end of a prompt, or the start of an answer."""
_OF_CALLS = re.compile("tool|call|constrain|function", re.IGNORECASE)
_NEVER_SAID = re.compile(r"[<\[].*(reserved|unused|placeholder).*[>\]]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Split:
    """An answer, taken apart. Neither text carries a marker of reasoning."""

    reasoning: str
    content: str
    reasoning_tokens: int
    """Output ids up to and with the closing marker."""
    flags: list[str]
    """What is wrong with it, as far as the ids alone tell."""


class Splitter:
    """Splits the answers of one model. Safe to share between threads."""

    def __init__(self, tokenizer: Any, markers: Markers) -> None:
        self._tokenizer = tokenizer
        self.markers = markers
        self.decode = make_decoder(tokenizer)
        """Ids to text without special tokens."""
        self._is_blank = lru_cache(
            lambda ids: not self._decode_all(ids).strip()
        )  # nearly always the same ids

    def __call__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Split:
        """Reasoning and content of an answer to a prompt."""
        ids, marks = list(output_ids), self.markers
        start = self._begins(ids)  # some models repeat the marker that opened the prompt
        if not marks or not (start or self.is_opened(prompt_ids)):
            content, flags = self._content(ids)
            return Split("", content, 0, flags)
        at = find(ids, marks.close, start)
        flags = []
        after = len(ids) if at is None else at + len(marks.close)
        if marks.leaves_for:
            leaves = find(ids[:at], marks.leaves_for, start)
            if leaves is not None:
                at, after = leaves, leaves
                flags.append(LEFT_FOR_CALL)
        if at is None:
            text, flags = self._text(self._without_end(ids[start:]))
            return Split(text, "", len(ids), ["reasoning_never_closed", *flags])
        reasoning, about_reasoning = self._text(ids[start:at])
        if not marks.answer and find(ids, marks.close, after) is not None:
            flags.append("several_closes")
        content, about_content = self._content(ids[after:])
        found = {*about_reasoning, *about_content}
        flags += [flag for flag in ("control_tokens", "cut_character") if flag in found]
        return Split(reasoning, content, after, flags)

    def reasons(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning or right behind it, as where it is switched off."""
        behind = self._behind(prompt_ids, self.markers.close)
        return self.is_opened(prompt_ids) or (behind is not None and self._is_blank(behind))

    @cached_property
    def _control(self) -> frozenset[int]:
        """Tokens that no text holds: special and reserved ones, and markers; those of tool calls apart."""
        tokenizer, marks = self._tokenizer, self.markers
        control = {int(i) for i in tokenizer.all_special_ids}
        control.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        control.update(i for token, i in tokenizer.get_vocab().items() if _NEVER_SAID.fullmatch(token))
        control = {i for i in control if not _OF_CALLS.search(str(tokenizer.convert_ids_to_tokens(i)))}
        control.update(ids[0] for ids in (marks.open, marks.close) if len(ids) == 1)
        return frozenset(control)

    def _begins(self, ids: list[int]) -> int:
        """Where reasoning begins that the answer opens itself, behind the marker; 0 where it does not."""
        marker = self.markers.open
        at = find(ids[: len(marker) + _SPACE], marker) if marker else None
        return at + len(marker) if at is not None and self._is_blank(tuple(ids[:at])) else 0

    def is_opened(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside reasoning: opened, with nothing but white space behind."""
        behind = self._behind(prompt_ids, self.markers.open)
        # Special tokens count: `<think></think>` is reasoning that was opened and closed.
        return behind is not None and self._is_blank(behind)

    def _behind(self, prompt_ids: Sequence[int], marker: Sequence[int]) -> tuple[int, ...] | None:
        """The few ids behind the last such marker, where it is near the end."""
        tail = list(prompt_ids[-len(marker) - _SPACE :])
        at = find(tail, marker)
        while at is not None and (later := find(tail, marker, at + 1)) is not None:
            at = later
        return None if at is None else tuple(tail[at + len(marker) :])

    def _content(self, ids: list[int]) -> tuple[str, list[str]]:
        """What is said aloud, and what is wrong with it."""
        marks, ids = self.markers, self._without_end(ids)
        if marks.answer and (at := find(ids, marks.answer)) is not None:
            return self._text(ids[at + len(marks.answer) :])
        if marks.leaves_for and (at := find(ids, marks.leaves_for)) is not None:
            # A call: its markers are its form, and stay.
            _, flags = self._text(ids if not marks.answer else [])
            return self._decode_all(ids if not marks.answer else ids[at:]).strip(), flags
        if marks.answer and ids and ids[0] in self._control:
            return "", []  # it ended before its header was whole
        return self._text(ids)

    def _without_end(self, ids: list[int]) -> list[int]:
        """Without the token that ended the answer."""
        return ids[:-1] if ids and ids[-1] in self._control else ids

    def _text(self, ids: list[int]) -> tuple[str, list[str]]:
        text = self.decode(ids)
        flags = [] if self._control.isdisjoint(ids) else ["control_tokens"]
        if "\ufffd" in text and not self.decode.is_whole(ids):
            flags.append("cut_character")
        return text.strip(), flags

    def _decode_all(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
