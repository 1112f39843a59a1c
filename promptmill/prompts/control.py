"""Text that would become ids for control: a token that the tokenizer has added, spelt out in a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from promptmill.types import Message

_START = 3
"""Characters by which a place that may hold a token is told; few tokens are shorter."""


class ControlTokens:
    """Finds them. Not all are flagged as special: markers of roles, calls and reasoning often are not."""

    def __init__(self, tokens: Iterable[str], reasoning_markers: Iterable[str] = ()) -> None:
        """`reasoning_markers` may stand in an assistant's message, where templates look for them."""
        spelt = sorted({token for token in tokens if token.strip()}, key=len, reverse=True)
        # Some tokenizers add runs of spaces, which are text like any other.
        self._any = _OneOf(spelt)
        own = set(reasoning_markers)
        self._any_of_assistant = _OneOf([token for token in spelt if token not in own])

    def find(self, turns: Sequence[Sequence[Message]], tools: Any) -> str:
        """The first one in the messages or tools of a conversation, or ""."""
        for turn in turns:
            for message in turn:
                pattern = self._any_of_assistant if message["role"] == "assistant" else self._any
                for text in _texts_of(message):
                    if found := pattern.first(text):
                        return found
        for text in _texts(tools):
            if found := self._any.first(text):
                return found
        return ""


class _OneOf:
    """Looks for hundreds of tokens in text, some of which begins like many of them: code is full of `<`."""

    def __init__(self, tokens: list[str]) -> None:
        self._starts = _pattern(sorted({token[:_START] for token in tokens}, key=len, reverse=True))
        self._whole = _pattern(tokens)

    def first(self, text: str) -> str:
        at = 0
        while start := self._starts.search(text, at):
            if found := self._whole.match(text, start.start()):
                return found.group()
            at = start.start() + 1
        return ""


def _pattern(tokens: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")


def _texts_of(message: Message) -> Iterable[str]:
    """Every text of a message but the names of what it is made of."""
    if len(message) == 2:  # role and content
        return (message["content"],)
    return _texts(list(message.values()))


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
