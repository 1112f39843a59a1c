"""CPU seconds of this process, all threads, for every 1,000 answers; the same for whoever is measured."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LOOK_S = 0.05


@dataclass(slots=True)
class Meter:
    """Looks at `done` until `stop`; what comes before `first` answers and behind `last` is not counted."""

    done: Callable[[], int]
    first: int
    last: int
    _looks: list[tuple[int, float, float, float]] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __enter__(self) -> Meter:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def result(self) -> dict[str, Any]:
        within = [look for look in self._looks if self.first <= look[0] <= self.last]
        (done0, wall0, cpu0, rss0), (done1, wall1, cpu1, rss1) = within[0], within[-1]
        return {
            "answers": done1 - done0,
            "cpu_s_per_1000": round((cpu1 - cpu0) * 1000 / (done1 - done0), 3),
            "answers_per_s": round((done1 - done0) / (wall1 - wall0)),
            "busy": round((cpu1 - cpu0) / (wall1 - wall0), 2),
            "rss_mb": [round(rss0, 1), round(rss1, 1)],
            "load": [round(load, 2) for load in os.getloadavg()],
        }

    def cpu_s_at(self, done: int) -> float:
        """When so many answers were first seen to be there."""
        return next(cpu for seen, _, cpu, _ in self._looks if seen >= done)

    def _look(self) -> None:
        over = False
        while not over:
            over = self._over.wait(_LOOK_S)
            self._looks.append((self.done(), time.monotonic(), cpu_s(), rss_mb()))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
