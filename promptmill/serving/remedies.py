"""What to do after a server failed to start or died. Pure: history in, one verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SAME_DEATHS = 3


@dataclass(frozen=True, slots=True)
class Death:
    """How one life ended."""

    server: str
    phase: str
    """`start` before the gate let it through, `serving` after it."""
    cause: str
    answers: int
    """Answers that this life finished."""
    permanent: bool = False
    """A relaunch cannot help."""

    @property
    def kind(self) -> tuple[str, str]:
        """Deaths of one kind count as identical; the life's own name is not part of it."""
        return self.phase, self.cause.replace(self.server, "").partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Relaunch or stop, and why; `why` is for the user."""

    relaunch: bool
    why: str


def decide(deaths: Sequence[Death], max_relaunches: int) -> Verdict:
    """The verdict after the last of `deaths` (all of this run, oldest first; at least one)."""
    last = deaths[-1]
    if last.permanent:
        return Verdict(False, "a relaunch cannot mend this")
    recent = deaths[-_SAME_DEATHS:]
    if (
        len(recent) == _SAME_DEATHS
        and len({death.kind for death in recent}) == 1
        and not any(death.answers for death in recent)
    ):
        return Verdict(False, f"{_SAME_DEATHS} lives in a row ended the same way without one answer")
    if len(deaths) > max_relaunches:
        return Verdict(False, f"server.max_relaunches = {max_relaunches} is used up")
    return Verdict(True, "as it was")
