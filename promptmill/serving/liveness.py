"""Whether a server lives: tokens that move, and nothing that merely answers. Pure; `now` is passed in.

A 503 while tokens move is not death, a 200 without progress is not life. Silence counts from the last sign
that the server worked: a token of any of our streams, or a load that changed since the sample before. It is
death only while requests are in flight, and only after `inactivity_timeout_s`: compiling for a new shape may
take 70 s. One that puts off all that it is asked is given six times as long.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from promptmill.serving.client import Load

_REFUSED_S = 5.0
_REFUSALS = 3
_PUT_OFF_S = 5.0
_PUT_OFF_PATIENCE = 6
"""A server that says that it is too busy lives, but not for ever: in inactivity times."""
_WINDOW_S = 60.0
_COLLAPSE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    inactivity_timeout_s: float
    collapse_timeout_s: float


NO_PROMPTS_FAULT = ("lost_requests", "collapse", "sick")
"""Losses that no prompt can have brought about."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a server counts as lost. `signature` is for the remedies, `text` for people."""

    signature: str
    text: str


class Liveness:
    """Of one server, from the moment that it joined."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits = limits
        self._in_flight = 0
        self._moved_at = now
        self._put_off_at = -math.inf
        self._load: Load | None = None
        self._load_at = now
        self._refused_since: float | None = None
        self._refusals = 0
        self._pace = _Pace(now, limits.collapse_timeout_s)

    def sent(self, now: float) -> None:
        """One more request is in flight."""
        if not self._in_flight and not self._puts_off(now):
            self._moved_at = now  # silence counts from here, not from the last answer
        self._in_flight += 1

    def ended(self) -> None:
        self._in_flight -= 1

    def put_off(self, now: float) -> None:
        """It is too busy for a request, which will be sent again: that is silence too."""
        self._put_off_at = now

    @property
    def refusing(self) -> bool:
        """Nothing listened at its address when it was last asked."""
        return self._refused_since is not None

    def tokens(self, n: int, now: float) -> None:
        """`n` tokens came in one of our streams."""
        self._moved_at, self._put_off_at = now, -math.inf
        self._pace.add(n)

    def polled(self, load: Load | None, now: float) -> None:
        """It answered, with its load or without one (busy, refusing, or not that kind of server)."""
        self._refused_since, self._refusals = None, 0
        if load is not None:
            if self._load is not None and _moved(self._load, load):
                self._moved_at = now
            if self._load is None or load.as_of is None or load.as_of != self._load.as_of:
                self._load_at = now
            self._load = load

    def refused(self, now: float) -> None:
        """Nothing listens at its address."""
        self._refusals += 1
        if self._refused_since is None:
            self._refused_since = now

    def loss(self, now: float) -> Loss | None:
        """Why the server is lost, or None while it is not."""
        self._pace.sample(now, self._in_flight)
        if self._refused_since is not None and self._refusals >= _REFUSALS:
            since = max(self._refused_since, self._moved_at)
            if now - since >= _REFUSED_S:
                return Loss("refused", f"its address has refused connections for {now - since:.0f} s")
        silent = now - self._moved_at
        if self._puts_off(now):
            if silent >= _PUT_OFF_PATIENCE * self._limits.inactivity_timeout_s:
                return Loss("hang", f"it has put off every request for {silent:.0f} s")
        elif self._in_flight and silent >= self._limits.inactivity_timeout_s:
            return self._hung(silent, now)
        if collapsed := self._pace.collapsed(now, self._in_flight):
            return Loss("collapse", collapsed)
        return None

    def _puts_off(self, now: float) -> bool:
        return now - self._put_off_at < _PUT_OFF_S

    def _hung(self, silent: float, now: float) -> Loss:
        requests = "1 request" if self._in_flight == 1 else f"{self._in_flight} requests"
        waiting = f"no token for {silent:.0f} s with {requests} in flight"
        load = self._load
        # A scheduler that stands still has not counted since: its last sample is as old as the silence.
        told = load is not None and (load.as_of is None or now - self._load_at < silent / 2)
        if told and load is not None and load.running == 0 and not load.queued:
            return Loss("lost_requests", f"{waiting}, and it says that it has none")
        return Loss("hang", waiting)


def _moved(before: Load, after: Load) -> bool:
    """A fresh time alone is no progress: an idle scheduler has it too."""
    return (before.running, before.queued, before.used_tokens) != (
        after.running,
        after.queued,
        after.used_tokens,
    )


class _Pace:
    """Throughput over the last minute against the best minute before, with as many requests in flight."""

    def __init__(self, now: float, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._tokens = 0
        self._samples: deque[tuple[float, int, int]] = deque([(now, 0, 0)])  # time, tokens so far, in flight
        self._best = 0.0
        self._best_in_flight = 0
        self._low_since: float | None = None

    def add(self, n: int) -> None:
        self._tokens += n

    def sample(self, now: float, in_flight: int) -> None:
        """Called as often as one likes; one sample a second is kept."""
        if now - self._samples[-1][0] < 1.0:
            return
        self._samples.append((now, self._tokens, in_flight))
        while len(self._samples) > 2 and now - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        start, tokens, _ = self._samples[0]
        if now - start < _WINDOW_S:
            return
        rate = (self._tokens - tokens) / (now - start)
        least = min(n for _, _, n in list(self._samples)[1:])  # the first one stands for the time before
        if rate > self._best:
            self._best, self._best_in_flight = rate, least
        low = rate < _COLLAPSE_SHARE * self._best and least >= max(1, self._best_in_flight // 2)
        if not low:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
            self._rate = rate

    def collapsed(self, now: float, in_flight: int) -> str:
        if self._low_since is None or now - self._low_since < self._timeout_s:
            return ""
        return (
            f"throughput fell below a quarter of the {self._best:.0f} tokens/s that it had, "
            f"{now - self._low_since:.0f} s ago, with {in_flight} requests in flight"
        )
