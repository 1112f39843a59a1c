"""How many requests one server has in flight. Pure: `now` is passed in.

SGLang admits by the KV tokens that are left, so no length has to be predicted here: what keeps it fast is a
short queue of its own that is never empty. The window follows how many requests the server runs.
"""

from __future__ import annotations

import math

START = 32
SMALLEST, LARGEST = 4, 1024
STALE_S = 30.0
"""Without a good sample for this long, capacity and the mean size of a request decide."""
_QUEUE = 4
_SHRINK = 0.75
_GROWTH = 0.25

_DECAY = 0.998
"""A finished request; half of the sums is younger than 350 of them."""
_PRIOR_KV_TOKENS = 4_000
_PRIOR_OUTPUT_TOKENS = 40_000


class RequestSizes:
    """KV tokens that a running request holds on average, learned from those that finished on any server."""

    def __init__(self) -> None:
        self._kv_steps = 0.0
        self._steps = 0.0

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request of that size has been answered; failures tell nothing."""
        # It held its prompt and half of its answer for as many steps as the answer has tokens.
        held = prompt_tokens * output_tokens + output_tokens**2 / 2
        self._kv_steps = self._kv_steps * _DECAY + held
        self._steps = self._steps * _DECAY + output_tokens

    @property
    def kv_mean(self) -> float:
        """In KV tokens a request, over time; 4,000 while nothing is known."""
        prior = _PRIOR_KV_TOKENS * _PRIOR_OUTPUT_TOKENS
        return (self._kv_steps + prior) / (self._steps + _PRIOR_OUTPUT_TOKENS)


class Window:
    """Of one life of a server, from the moment that it joined; a relaunched one gets a new window."""

    def __init__(
        self, capacity_tokens: int | None, limit: int | None, sizes: RequestSizes, now: float
    ) -> None:
        """`capacity_tokens` is the server's KV cache, if it says; `limit` the most that may be in flight."""
        self._capacity_tokens = capacity_tokens
        self._largest = min(LARGEST, limit or LARGEST)
        self._sizes = sizes
        self._sampled_at = now
        self._size = self._clamp(START)

    def sample(self, now: float, running: int, queued: int, in_flight: int) -> None:
        """The server's own load, over all its ranks, and what we have in flight on it; every 5 s or so.

        Only an answered poll is a sample: nothing is told of one that failed.
        """
        size = self.size(now)
        if queued > 0:
            size = max(running + _QUEUE, math.floor(_SHRINK * size))
        elif in_flight >= size - 1:
            size = max(size, running + max(_QUEUE, math.ceil(_GROWTH * running)))
        self._size = self._clamp(size)
        self._sampled_at = now

    def size(self, now: float) -> int:
        """Requests that may be in flight now."""
        if self._capacity_tokens is None or now - self._sampled_at < STALE_S:
            return self._size
        return self._clamp(int(self._capacity_tokens / self._sizes.kv_mean))

    def _clamp(self, size: int) -> int:
        return min(max(size, SMALLEST), self._largest)
