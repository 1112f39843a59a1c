"""Counting while it runs: tokens/s over the last seconds, and what is left. Pure; `now` is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from promptmill.events import Figures, Progress, Serving
from promptmill.generation.forecast import Forecast

_WINDOW_S = 15.0


@dataclass(slots=True)
class Counter:
    """One partition's numbers."""

    total: int
    done: int
    in_flight: int = 0
    tokens: int = 0
    ended: int = 0
    """In this run, failures included."""
    failed: int = 0
    """Of these."""

    @property
    def left(self) -> int:
        return self.total - self.done


@dataclass(slots=True)
class Meter:
    """All partitions' numbers, and the pace."""

    counters: dict[str, Counter] = field(default_factory=dict)
    forecast: Forecast = field(default_factory=Forecast)
    resumed_tokens: int = 0
    refilled_tokens: int = 0
    retractions: int = 0
    _ticks: deque[tuple[float, int, int]] = field(default_factory=deque)
    _answers_here: int = 0

    def sent(self, partition: str, prompt_tokens: int, partial_tokens: int) -> None:
        """A request goes out, on the tokens that an earlier one gave."""
        self.forecast.begun(partition, prompt_tokens, prompt_tokens + partial_tokens)
        if partial_tokens:
            self.resumed_tokens += partial_tokens
            self.refilled_tokens += prompt_tokens + partial_tokens

    def received(self, partition: str, tokens: int, context_tokens: int) -> None:
        """Tokens came of a request that held `context_tokens` before them."""
        self.counters[partition].tokens += tokens
        self.forecast.produced(partition, tokens, context_tokens)

    def ended(self, partition: str, failed: bool, turns_left: int) -> None:
        """A prompt has its record; `turns_left` more that were expected of its conversation will not come."""
        counter = self.counters[partition]
        counter.done += 1
        counter.failed += failed
        counter.ended += 1
        counter.total -= turns_left
        self._answers_here += 1

    def figures(self, now: float, servers: Sequence[Serving] = (), gpus: int = 0) -> Figures:
        """The figures at `now`; call it about once a second."""
        tokens = sum(c.tokens for c in self.counters.values())
        self._ticks.append((now, tokens, self._answers_here))
        while now - self._ticks[0][0] > _WINDOW_S:
            self._ticks.popleft()
        then, tokens_then, answers_then = self._ticks[0]
        seconds = now - then
        return Figures(
            partitions=[
                Progress(name, c.total, c.done, c.in_flight, c.tokens) for name, c in self.counters.items()
            ],
            servers=list(servers),
            tokens_per_s=(tokens - tokens_then) / seconds if seconds > 0 else 0.0,
            answers_per_s=(self._answers_here - answers_then) / seconds if seconds > 0 else 0.0,
            seconds_left=self._seconds_left(now),
            gpus=gpus,
            retractions=self.retractions,
            resumed_tokens=self.resumed_tokens,
            refilled_tokens=self.refilled_tokens,
        )

    def _seconds_left(self, now: float) -> float | None:
        """None while there is too little to go by."""
        self.forecast.sample(now)
        return self.forecast.seconds_left({name: c.left - c.in_flight for name, c in self.counters.items()})
