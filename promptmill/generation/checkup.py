"""Check-ups of one server: is what it answers still what its model answers?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from promptmill import events
from promptmill.errors import PromptmillError
from promptmill.generation.sickness import Usefulness, is_alike

_PATIENCE_S = 60.0
_TIMES = 2
_TIMES_UNANSWERED = 3
_MOST = 5_000
"""Answers between two check-ups."""


class CheckUp:
    """Owned by the server's replica."""

    def __init__(
        self, name: str, ask: Callable[[], Awaitable[str]], reference: str, interval_s: float
    ) -> None:
        """`ask` gives the answer to the question that was answered with `reference` at the gate.

        Without a reference, or with an interval of 0, there are no check-ups and every answer counts.
        """
        self.sick = ""
        """What it answered instead, twice in a row."""
        self.unconfirmed: dict[str, str] = {}
        """Partitions of the answers since the last good check-up, by prompt hash."""
        self._name = name
        self._ask = ask
        self._reference = reference
        self._interval_s = interval_s if reference else 0.0
        self._usefulness = Usefulness()
        self._suspicious = False
        self._unanswered = 0
        self._due = asyncio.Event()

    @property
    def holds_up(self) -> bool:
        """Whether it shall get no requests until it was checked."""
        return self._suspicious

    def answered(self, prompt_hash: str, partition: str, useful: bool) -> None:
        if not self._interval_s:
            return
        self.unconfirmed[prompt_hash] = partition
        if self._usefulness.add(useful):
            self._suspicious = True
        if self._suspicious or len(self.unconfirmed) >= _MOST:
            self._due.set()

    def followed(self, earlier: Iterable[str], prompt_hash: str, partition: str) -> None:
        """Whichever server gave it, a later answer of a conversation falls with those before it."""
        if any(before in self.unconfirmed for before in earlier):
            self.unconfirmed[prompt_hash] = partition

    def hurry(self) -> None:
        """Somebody waits for it."""
        self._due.set()

    async def run(self) -> None:
        """From time to time, when it is hurried, and where suddenly most answers are of no use."""
        while self._interval_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._due.wait()
            self._due.clear()
            good = await self._confirm()
            if self._suspicious and good:
                text = f"{self._usefulness.useless} of its last answers are truncated, empty or flagged"
                events.tell(events.Notice(f"{self._name}: {text}; its check-up found nothing"))
                self._usefulness.accept()
                self._suspicious = False
            elif self._suspicious and not self.sick:
                self._due.set()  # it gets no requests until this is known

    async def _confirm(self) -> bool:
        """Check it now; whether it is well.

        One that answers none of three check-ups is left to those who watch whether it lives.
        """
        before = list(self.unconfirmed)
        if not before or self.sick:
            return not self.sick
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self.sick = await self._look()
            self._unanswered = 0
        except (PromptmillError, TimeoutError):
            self._unanswered += 1
            if self._unanswered < _TIMES_UNANSWERED:
                return False
        if not self.sick:
            for prompt_hash in before:
                self.unconfirmed.pop(prompt_hash, None)
        return not self.sick

    async def _look(self) -> str:
        """What it answers, if that is not what it answered at the gate."""
        for _ in range(_TIMES):
            answer = await self._ask()
            if is_alike(self._reference, answer):
                return ""
        return f"it answers {answer[:80]!r} where it answered {self._reference[:80]!r}"
