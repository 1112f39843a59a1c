"""When it will be over. Pure; `now` is passed in.

What a full server gets through in a second is neither requests nor tokens but KV tokens times decode steps: a
request of p prompt tokens holds p + k of them at its k-th step, p·o + o²/2 over an answer of o tokens. That
rate stays as it is while the mix of short and long answers changes.

Long answers finish late, so at first the lengths of those that have finished say too little. Until there are
enough of them, an answer is taken to end with the same chance at every token, and requests under way count.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_WINDOW_S = 600.0
_SAMPLE_S = 2.0
_LEAST_S = 10.0
_ENOUGH = 2.0
"""Finished answers for each request under way, before which nothing is said: the server fills up first."""
_TRUSTED = 8.0
"""Finished answers for each one under way, from which on they are believed alone."""


@dataclass(slots=True)
class Lengths:
    """Of the requests of one partition, in tokens."""

    cap: int
    prompt_mean: float
    """Before any was sent."""
    sent: int = 0
    prompts: int = 0
    """Prompt tokens of all that were sent."""
    under_way: int = 0
    held: int = 0
    """KV tokens of those under way."""
    produced: int = 0
    """Output tokens, of those under way too."""
    finished: int = 0
    ended: int = 0
    """Finished ones that came to an end before the cap."""
    outputs: int = 0
    squares: int = 0

    def work(self, waiting: int) -> float:
        """KV tokens times steps of `waiting` requests and of what those under way still have to do."""
        prompt = self.prompts / self.sent if self.sent else self.prompt_mean
        mean, square = self._moments()
        still, still_square = self._exponential()
        rest = self.held * still + self.under_way * still_square / 2
        return waiting * (prompt * mean + square / 2) + rest

    def _moments(self) -> tuple[float, float]:
        """Mean and mean square of an answer's tokens."""
        mean, square = self._exponential()
        if not self.finished:
            return mean, square
        own_mean, own_square = self.outputs / self.finished, self.squares / self.finished
        trust = min(1.0, self.finished / (_TRUSTED * self.under_way)) if self.under_way else 1.0
        return mean + trust * (own_mean - mean), square + trust * (own_square - square)

    def _exponential(self) -> tuple[float, float]:
        """The same, were the chance to end equal at every token, up to the cap."""
        rate = max(self.ended, 0.5) / max(self.produced, 1)
        stays = math.exp(-rate * self.cap)
        return (1 - stays) / rate, 2 / rate**2 * (1 - stays * (1 + rate * self.cap))


class Forecast:
    """Fed with all that is sent, every group of tokens and every answer of this run."""

    def __init__(self) -> None:
        self.lengths: dict[str, Lengths] = {}
        self._done = 0.0
        self._samples: deque[tuple[float, float]] = deque()

    def begun(self, partition: str, prompt_tokens: int, context_tokens: int) -> None:
        """A request goes out; its context is the prompt and what an earlier request gave."""
        lengths = self.lengths[partition]
        lengths.sent += 1
        lengths.prompts += prompt_tokens
        lengths.under_way += 1
        lengths.held += context_tokens

    def produced(self, partition: str, tokens: int, context_tokens: int) -> None:
        """Tokens came of a request that held `context_tokens` before them."""
        lengths = self.lengths[partition]
        lengths.produced += tokens
        lengths.held += tokens
        self._done += tokens * context_tokens + tokens * tokens / 2

    def left(self, partition: str, context_tokens: int) -> None:
        """A request is over, or was broken off, with that much context."""
        lengths = self.lengths[partition]
        lengths.under_way -= 1
        lengths.held -= context_tokens

    def finished(self, partition: str, output_tokens: int, truncated: bool) -> None:
        """An answer is there, whole."""
        lengths = self.lengths[partition]
        lengths.finished += 1
        lengths.ended += not truncated
        lengths.outputs += output_tokens
        lengths.squares += output_tokens**2

    def sample(self, now: float) -> None:
        """Call it about once a second, while something is served."""
        if not self._samples or now - self._samples[-1][0] >= _SAMPLE_S:
            self._samples.append((now, self._done))
            while now - self._samples[0][0] > _WINDOW_S:
                self._samples.popleft()

    def pause(self) -> None:
        """Nothing is served for now: what was measured before does not go on."""
        self._samples.clear()

    def seconds_left(self, waiting: dict[str, int]) -> float | None:
        """`waiting` counts the requests that were not sent yet. None while there is too little to go by."""
        if len(self._samples) < 2:
            return None
        (began, before), (now, done) = self._samples[0], self._samples[-1]
        known = self.lengths.values()
        few = sum(one.finished for one in known) < _ENOUGH * sum(one.under_way for one in known)
        if few or now - began < _LEAST_S or done <= before:
            return None
        work = sum(self.lengths[name].work(n) for name, n in waiting.items())
        return work * (now - began) / (done - before)
