"""Which prompt kills the server. Pure.

Prompts in flight without a first token when a server died are suspects: they are tried one at a time, the
next one when the one before has shown its first token. A suspect that was on trial at two deaths is guilty:
one may be a coincidence. That finds each poisoned prompt in three crashes, and no innocent one pays for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from promptmill.types import Prompt

DEATHS_ALONE = 2


class Suspects:
    """Owned by the mill's loop."""

    def __init__(self) -> None:
        self._waiting: dict[str, Prompt] = {}
        self._on_trial = ""
        self._died_alone: dict[str, int] = {}

    def __contains__(self, prompt_hash: str) -> bool:
        return prompt_hash in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._waiting.values())

    def died(self, silent: Iterable[Prompt]) -> Prompt | None:
        """A server died while these prompts waited there for a first token; the guilty one, if known."""
        tried = self._ended_trial(silent := list(silent))
        for prompt in silent:
            self._waiting.setdefault(prompt.prompt_hash, prompt)
        if not tried:
            return None
        self._died_alone[tried] = self._died_alone.get(tried, 0) + 1
        if self._died_alone[tried] < DEATHS_ALONE:
            return None
        return self._waiting.pop(tried)

    def interrupted(self, silent: Iterable[Prompt]) -> None:
        """A server was lost for a reason of its own: whoever was on trial there is tried again."""
        self._ended_trial(silent)

    def _ended_trial(self, silent: Iterable[Prompt]) -> str:
        """The one that was on trial on the server that was lost with these; empty if it was on another."""
        if not any(prompt.prompt_hash == self._on_trial for prompt in silent):
            return ""
        tried, self._on_trial = self._on_trial, ""
        return tried

    def next(self) -> Prompt | None:
        """The one to try now; None while one is on trial or nobody is suspected."""
        if self._on_trial or not self._waiting:
            return None
        self._on_trial = next(iter(self._waiting))
        return self._waiting[self._on_trial]

    def cleared(self, prompt_hash: str) -> None:
        """It showed a first token, or ended in another way that is not the server's death."""
        self._waiting.pop(prompt_hash, None)
        self._died_alone.pop(prompt_hash, None)
        if prompt_hash == self._on_trial:
            self._on_trial = ""

    def postponed(self, prompt_hash: str) -> None:
        """It was not tried: the server was too busy to take it, or it is to be asked again."""
        if prompt_hash == self._on_trial:
            self._on_trial = ""
