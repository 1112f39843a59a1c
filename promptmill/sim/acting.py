"""What the scheduler process does when a fault is due: it fails as the real one would."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import NoReturn

from promptmill.sim import crashes
from promptmill.sim.faults import Fault
from promptmill.sim.logs import Log

_LAST_WORDS_S = 0.05
"""Between an answer and the fault that it triggers, so that the answer reaches its client."""


def act(fault: Fault, log: Log, speed: float, watchdog_s: float, memory: dict[str, float]) -> None:
    """Returns from a freeze that ends, and from nothing else."""
    time.sleep(_LAST_WORDS_S)
    if fault.name in {"die", "zombie"}:
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.name == "freeze":
        while fault.argument is None:
            signal.pause()
        time.sleep(fault.seconds(0) / speed)
    elif fault.name == "watchdog":
        _hang(log, speed, watchdog_s)
    elif fault.name == "nccl":
        log.raw(crashes.NCCL_ABORT)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    else:
        crash(log, fault.name, False, memory)


def crash(log: Log, name: str, at_start: bool, facts: Mapping[str, object]) -> NoReturn:
    """Say what happened and tell the parent, which ends everything."""
    log.error(crashes.hit_an_exception(name, at_start, facts))
    os.kill(os.getppid(), signal.SIGQUIT)
    _wait_for_the_end()


def _hang(log: Log, speed: float, watchdog_s: float) -> NoReturn:
    """Its watchdog looks every half time-out; the process itself is what reports."""
    time.sleep(watchdog_s / speed)
    log.error(f"Scheduler watchdog timeout (self.watchdog_timeout={watchdog_s:g}, self.soft=False)")
    time.sleep(5 / speed)
    os.kill(os.getppid(), signal.SIGQUIT)
    _wait_for_the_end()


def _wait_for_the_end() -> NoReturn:
    while True:
        signal.pause()
