"""Which streams of one server broke together. Pure: `now` is passed in.

A prompt at fault breaks its own stream. Where most of what is in flight breaks in one moment, it was the
server or the way to it, although the server lives and answers others: no prompt is to pay for that.
"""

from __future__ import annotations

from collections import deque

TOGETHER_S = 1.0
FEWEST = 4
_KEPT = 4096


class Breaks:
    """Owned by the server's replica."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_KEPT)

    def broke(self, now: float, in_flight: int) -> None:
        """A stream broke while so many requests were in flight, itself included."""
        self._seen.append((now, in_flight))

    def together(self, at: float) -> bool:
        """Whether the stream that broke then was one of at least four, and of most that were in flight."""
        near = [in_flight for then, in_flight in self._seen if abs(then - at) <= TOGETHER_S]
        return len(near) >= FEWEST and 2 * len(near) > max(near)
