"""A server's deaths and what may follow them: plain data of the rules in remedies.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from promptmill.serving.logs import LogFacts
from promptmill.serving.signatures import Evidence
from promptmill.settings import FlagValue

Phase = Literal["start", "serving"]
"""Before the gate let it through, and after."""


def number(*values: object) -> float | None:
    """The first that is a number, or text that is one."""
    for value in values:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                continue
    return None


@dataclass(frozen=True, slots=True)
class Death:
    """How one life ended."""

    server: str
    phase: Phase
    cause: str
    """For people; its first line is what counts."""
    exit_status: int | None
    """None for one that had not ended: it hung, or the gate refused it."""
    evidence: Evidence | None
    answers: int
    """Answers that this life finished."""
    flags: Mapping[str, FlagValue]
    """As launched, names without dashes."""
    env: Mapping[str, str] = field(default_factory=dict)
    facts: LogFacts | None = None
    """What was in effect, whether or not a flag said so."""
    in_flight: int = 0
    quarantined: tuple[str, ...] = ()
    """Hash of the prompt that was convicted of this death and those before."""
    permanent: bool = False
    """A relaunch cannot help."""

    @property
    def signature(self) -> str:
        return self.evidence.signature if self.evidence else ""

    @property
    def kind(self) -> tuple[str, str]:
        """Deaths of one kind count as identical; the life's own name is not part of it."""
        if self.evidence and self.signature == "exception":
            return self.phase, self.evidence.line.partition(":")[0]
        if self.signature and self.signature != "unknown":
            return self.phase, self.signature
        cause = self.cause.replace(self.server, "") if self.server else self.cause
        return self.phase, cause.partition("\n")[0]

    @property
    def fraction(self) -> float | None:
        """The mem-fraction-static that was in effect."""
        told = self.evidence.numbers.get("current") if self.evidence else None
        known = self.facts.mem_fraction_static if self.facts else None
        return number(self.flags.get("mem-fraction-static"), known, told)


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the next launch."""

    flag: str
    """Without dashes; "env:NAME" is an environment variable."""
    before: FlagValue | None
    """What was in effect; None where it was unset and the log does not tell."""
    after: FlagValue | None
    """None: it is left out."""

    def __str__(self) -> str:
        if self.after is None:
            return f"without {self.flag}"
        return f"{self.flag} {'unset' if self.before is None else self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows; `why` is one line for people, `advice` what they can do where we cannot."""

    action: Literal["relaunch", "step", "wait", "quarantine", "stop"]
    why: str
    steps: tuple[Step, ...] = ()
    wait_s: float = 0.0
    advice: str = ""

    @property
    def relaunch(self) -> bool:
        return self.action != "stop"


@dataclass(frozen=True, slots=True)
class History:
    """All deaths of a run, oldest first, as the rules look at them."""

    deaths: Sequence[Death]
    version: tuple[int, ...] | None

    @property
    def last(self) -> Death:
        return self.deaths[-1]

    @property
    def evidence(self) -> Evidence:
        return self.last.evidence or Evidence("")

    @property
    def count(self) -> int:
        """Deaths of the last one's signature."""
        return sum(death.signature == self.last.signature for death in self.deaths)

    @property
    def streak(self) -> int:
        """The same, with no other between."""
        others = (n for n, d in enumerate(reversed(self.deaths)) if d.signature != self.last.signature)
        return next(others, len(self.deaths))

    @property
    def fruitless(self) -> int:
        """The same, back to the last death that had answered something or found its prompt."""
        recent = list(reversed(self.deaths))[: self.streak]
        fruits = (n for n, d in enumerate(recent) if d.answers or d.quarantined)
        return next(fruits, len(recent))


def step(why: str, *steps: Step) -> Verdict:
    return Verdict("step", f"{why}: {', '.join(map(str, steps))}", steps)


def wait(history: History, why: str, advice: str, times: int = 3) -> Verdict:
    """Longer each time in a row; the last of `times` stops."""
    n = history.fruitless
    if n >= times:
        return Verdict("stop", f"{why}, {n} times in a row", advice=advice)
    seconds = min(30.0 * 2 ** max(0, n - 1), 300.0)
    return Verdict("wait", f"{why}; waiting {seconds:.0f} s first", wait_s=seconds)
