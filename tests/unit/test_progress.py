"""How far rows are, counted with arrays: as a loop over rows, samples and turns would have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptmill.prompts.hashing import digests
from promptmill.prompts.manifest import Keys
from promptmill.store.index import Known
from promptmill.store.progress import Progress, rank
from promptmill.types import WORST_FIRST
from tests.helpers_store import sha

STATUSES = [status for status in WORST_FIRST if status != "rejected"]
ROWS = st.lists(
    st.lists(st.lists(st.sampled_from(STATUSES), min_size=1, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=12,
)


def keys_and_ranks(rows: Sequence[Sequence[Sequence[str]]]) -> tuple[Keys, np.ndarray]:
    chains, starts, flat = [], [], []
    for samples in rows:
        starts.append(len(chains))
        for turns in samples:
            chains.append(len(flat))
            flat.extend(turns)
    hashes = digests(pa.array([sha(str(i)) for i in range(len(flat))]))
    ranks = np.array([WORST_FIRST.index(status) for status in flat])
    return Keys(hashes, np.array(chains), np.array(starts)), ranks


def stop_of(turns: Sequence[str]) -> int | None:
    """The turn behind which no other is asked."""
    return next((i for i, status in enumerate(turns) if status not in ("answered", "flagged")), None)


def sample_status(turns: Sequence[str]) -> str:
    stop = stop_of(turns)
    return turns[stop] if stop is not None else "flagged" if "flagged" in turns else "answered"


@settings(deadline=None)
@given(ROWS)
def test_progress_is_that_of_a_loop(rows: list[list[list[str]]]) -> None:
    progress = Progress.of(*keys_and_ranks(rows))
    statuses = [[sample_status(turns) for turns in samples] for samples in rows]
    worst = [min(map(WORST_FIRST.index, found)) for found in statuses]
    assert progress.row_ranks().tolist() == worst
    assert progress.pending_rows().tolist() == ["pending" in found for found in statuses]
    chains = [turns for samples in rows for turns in samples]
    assert progress.turns.tolist() == list(map(len, chains))
    over = [stop_of(turns) if sample_status(turns) == "pending" else len(turns) for turns in chains]
    assert progress.over.tolist() == over
    halves = [
        any(sample_status(turns) == "pending" and stop_of(turns) for turns in samples) for samples in rows
    ]
    assert progress.half_rows().tolist() == halves


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (Known("answered", "stop", 8), "answered"),
        (Known("flagged", "stop", 8), "flagged"),
        (Known("empty", "stop", 8), "empty"),
        (Known("truncated", "length", 64), "truncated"),
        (Known("truncated", "length", 8), "pending"),
        (Known("failed", "", 8), "failed"),
    ],
)
def test_rank_asks_again_only_for_what_was_cut_below_the_cap(known: Known, expected: str) -> None:
    assert WORST_FIRST[rank(known, 64)] == expected
