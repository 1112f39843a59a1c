"""Scripted faults, one line each: `--sim-fault SPEC` (repeatable) or lines of `--sim-fault-file`.

    start:NAME[:ARG][,lives=K]              while it starts
    NAME[:ARG][@TRIGGER=VALUE][,lives=K]    while it serves; without a trigger at once

Triggers: `answers=N` answers given, `running=N` requests running, `t=S` simulated seconds after it was ready,
`token=ID` a prompt that holds the id (each one: it is poison). `lives=K`: only in the first K launches with
one --sim-state-dir. Times (ARG) are simulated seconds.

start: oom (weights) · kv (too small a fraction) · graph-oom · unbalanced · nccl · shm · shm:bus · host-memory
    · disk · import · dist-port · warmup (all: status -9) · killed (SIGKILL of the scheduler: status 1)
    · bad-model · kv-dtype (status 1) · hang · slow-progress:SECONDS
serving, the scheduler ends and the server with it (status -9): die · oom · kv-oom · illegal · nccl · leak
    · disk · watchdog (it hangs, until --watchdog-timeout is over)
serving, the server stays: zombie (the scheduler is dead, HTTP answers) · freeze[:SECONDS] · collapse (5 %
    of the speed from the next retraction on) · lost (requests are taken and never run) · busy:S
    (/health finds nothing alive while tokens move) · full:S (/generate is 503) · cut (all connections)
    · http500:N (the next N calls of /generate)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

START = frozenset(
    [
        "oom",
        "kv",
        "graph-oom",
        "unbalanced",
        "nccl",
        "shm",
        "host-memory",
        "disk",
        "import",
        "dist-port",
        "warmup",
        "killed",
        "bad-model",
        "kv-dtype",
        "hang",
        "slow-progress",
    ]
)
SCHEDULER = frozenset(
    ["die", "oom", "kv-oom", "illegal", "nccl", "leak", "disk", "watchdog", "zombie", "freeze", "collapse"]
)
HTTP = frozenset(["lost", "busy", "full", "cut", "http500"])
_TRIGGERS = ("answers", "running", "t", "token")
_SPEC = re.compile(
    r"(?P<start>start:)?(?P<name>[a-z0-9-]+)(:(?P<argument>[\w.]+))?"
    r"(@(?P<trigger>[a-z]+)=(?P<value>[\d.]+))?(,lives=(?P<lives>\d+))?"
)


class BadFault(ValueError):
    """A line that is no fault; the text says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One line, parsed."""

    name: str
    at_start: bool = False
    argument: str | None = None
    trigger: str = "t"
    value: float = 0.0
    lives: int | None = None

    def seconds(self, default: float) -> float:
        return float(self.argument) if self.argument else default


def parse_fault(line: str) -> Fault:
    """Raises BadFault."""
    match = _SPEC.fullmatch(line.strip())
    if match is None:
        raise BadFault(f"no fault: {line!r}")
    at_start, name, trigger = bool(match["start"]), match["name"], match["trigger"]
    if name not in (START if at_start else SCHEDULER | HTTP):
        raise BadFault(f"unknown fault {name!r} in {line!r}")
    if trigger is not None and (at_start or trigger not in _TRIGGERS):
        raise BadFault(f"no trigger of a fault here: {trigger!r} in {line!r}")
    lives = int(match["lives"]) if match["lives"] else None
    return Fault(name, at_start, match["argument"], trigger or "t", float(match["value"] or 0), lives)


def parse_faults(lines: Iterable[str], life: int) -> list[Fault]:
    """Faults of the `life`-th launch (from 1). Empty lines and `#` comments are skipped."""
    faults = [parse_fault(line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return [fault for fault in faults if fault.lives is None or life <= fault.lives]


class Triggers:
    """Which faults are due; each fires once, poison whenever it is swallowed."""

    def __init__(self, faults: Sequence[Fault], names: frozenset[str]) -> None:
        mine = [fault for fault in faults if not fault.at_start and fault.name in names]
        self._waiting = [fault for fault in mine if fault.trigger != "token"]
        self._poison = [fault for fault in mine if fault.trigger == "token"]

    def due(self, answers: int, running: int, t_s: float) -> list[Fault]:
        """Those whose trigger has been reached by now; they are not returned again."""
        if not self._waiting:
            return []
        now = {"answers": answers, "running": running, "t": t_s}
        fired = [fault for fault in self._waiting if now[fault.trigger] >= fault.value]
        self._waiting = [fault for fault in self._waiting if fault not in fired]
        return fired

    def poisoned(self, ids: Sequence[int]) -> list[Fault]:
        """Those that this prompt sets off."""
        return [fault for fault in self._poison if int(fault.value) in ids]
