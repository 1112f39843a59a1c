"""How far rows are, from what is known of their prompts. Pure, and without a loop over rows.

A prompt has a rank: the place of its status in WORST_FIRST, where one that needs a request is `pending`. A
sample is as the first turn that stopped it, a row as the worst of its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from promptmill.prompts.manifest import Keys
from promptmill.store.index import Known
from promptmill.types import WORST_FIRST

Ranks = npt.NDArray[np.int64]
PENDING = WORST_FIRST.index("pending")
FAILED = WORST_FIRST.index("failed")
_GOES_ON = min(WORST_FIRST.index("answered"), WORST_FIRST.index("flagged"))


def is_cut_below(known: Known, max_new_tokens: int) -> bool:
    """Whether an answer ended at a cap that was lower than today's."""
    return known.finish_reason == "length" and known.max_new_tokens < max_new_tokens


def rank(known: Known, max_new_tokens: int) -> int:
    """The rank of a prompt with this answer. A failure is final here."""
    if known.status != "failed" and is_cut_below(known, max_new_tokens):
        return PENDING
    return WORST_FIRST.index(known.status)


@dataclass(frozen=True, slots=True)
class Progress:
    """Of some rows, sample by sample."""

    ranks: Ranks
    """By sample."""
    turns: npt.NDArray[np.int64]
    """By sample."""
    over: npt.NDArray[np.int64]
    """Turns of each sample that need no request: those ahead of the first pending one, or all."""
    rows: npt.NDArray[np.int64]
    """Where each row's samples start."""

    @classmethod
    def of(cls, keys: Keys, ranks: Ranks) -> Progress:
        """`ranks` are those of the prompts, in the order of `keys.digests`."""
        n = len(ranks)
        turns = np.diff(np.append(keys.chains, n))
        stops_at = np.minimum.reduceat(np.where(ranks < _GOES_ON, np.arange(n), n), keys.chains)
        samples = np.where(
            stops_at < n, np.append(ranks, PENDING)[stops_at], np.minimum.reduceat(ranks, keys.chains)
        )
        over = np.where(samples == PENDING, stops_at - keys.chains, turns)
        return cls(samples, turns, over, keys.rows)

    def row_ranks(self) -> Ranks:
        return np.minimum.reduceat(self.ranks, self.rows)

    def pending_rows(self) -> npt.NDArray[np.bool_]:
        """Rows with a sample that needs a request."""
        return np.logical_or.reduceat(self.ranks == PENDING, self.rows)

    def half_rows(self) -> npt.NDArray[np.bool_]:
        """Rows with a sample that needs one, and has turns answered ahead of it."""
        return np.logical_or.reduceat((self.ranks == PENDING) & (self.over > 0), self.rows)
