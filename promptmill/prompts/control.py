"""Text that would become ids for control: a token that the tokenizer has added, spelt out in a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from promptmill.types import Message


class ControlTokens:
    """Finds them. Not all are flagged as special: markers of roles, calls and reasoning often are not."""

    def __init__(self, tokens: Iterable[str], reasoning_markers: Iterable[str] = ()) -> None:
        """`reasoning_markers` may stand in an assistant's message, where templates look for them."""
        spelt = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
        # Some tokenizers add runs of spaces, which are text like any other.
        self._any = _pattern(spelt)
        own = set(reasoning_markers)
        self._any_of_assistant = _pattern([token for token in spelt if token not in own])

    def find(self, turns: Sequence[Sequence[Message]], tools: Any) -> str:
        """The first one in the messages or tools of a conversation, or ""."""
        for turn in turns:
            for message in turn:
                pattern = self._any_of_assistant if message["role"] == "assistant" else self._any
                for text in _texts(message):
                    if found := pattern.search(text):
                        return found.group()
        for text in _texts(tools):
            if found := self._any.search(text):
                return found.group()
        return ""


def _pattern(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _texts(value: Any) -> Iterator[str]:
    """Every text in `value`, keys included."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item
