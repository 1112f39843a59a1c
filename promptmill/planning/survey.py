"""What the prepared prompts are: their lengths, families that begin alike, rows that repeat others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from promptmill.generation.order import family_of_start
from promptmill.prompts import json_text
from promptmill.prompts.hashing import DIGEST, Digests
from promptmill.prompts.manifest import read_key_arrays
from promptmill.store.store import Store
from promptmill.types import Manifest

Ints = npt.NDArray[np.int64]
_BATCH_ROWS = 500
_FAMILIES = 2_000
"""The largest so many of a partition are measured; smaller ones count as nothing shared."""
_START_TOKENS = 16_384
"""No more of a common start is looked for."""
BOUNDS = tuple(2**power for power in range(7, 18))
"""Upper bounds of the histogram's buckets, in tokens; the last one has none."""


@dataclass(frozen=True, slots=True)
class Survey:
    """One partition; the arrays have an entry for each of its prompts, in input order."""

    manifest: Manifest
    tokens: Ints
    """Of the first turn."""
    families: Ints
    """The number of its family; -1 where it begins like no other."""
    shared: Ints
    """By family: tokens of the start that all of its prompts have."""
    turns: Ints
    left: Ints
    """Requests that it still needs, over all samples and turns; 0 for one that repeats another."""
    repeats: npt.NDArray[np.bool_]
    """It is the same as an earlier one, in every turn: it is answered by that one's answer."""

    def histogram(self) -> list[int]:
        """Prompts by bucket."""
        counts = np.bincount(np.searchsorted(BOUNDS, self.tokens), minlength=len(BOUNDS) + 1)
        return [int(count) for count in counts]

    def percentile(self, share: int) -> int:
        return int(np.percentile(self.tokens, share)) if len(self.tokens) else 0

    def family_count(self) -> int:
        return int((self.shared > 0).sum())

    def reusable_tokens(self) -> int:
        """Prompt tokens that a server's cache can have from another prompt of the family."""
        members = np.bincount(self.families[self.families >= 0], minlength=len(self.shared))
        return int((np.maximum(members - 1, 0) * self.shared).sum())


def survey(manifests: Sequence[Manifest], store: Store) -> list[Survey]:
    """Of each partition. A prompt that stands in two partitions is a repetition in the second one."""
    keys = [_of_keys(manifest, store) for manifest in manifests]
    last = np.concatenate([digests for digests, _, _ in keys]) if keys else np.empty(0, DIGEST)
    repeats = np.ones(len(last), np.bool_)
    repeats[np.unique(last, return_index=True)[1]] = False
    found, start = [], 0
    for manifest, (digests, turns, left) in zip(manifests, keys, strict=True):
        again = repeats[start : start + len(digests)]
        start += len(digests)
        families = _families(manifest, len(digests))
        tokens, shared = _lengths(manifest, families)
        found.append(Survey(manifest, tokens, families, shared, turns, np.where(again, 0, left), again))
    return found


def _of_keys(manifest: Manifest, store: Store) -> tuple[Digests, Ints, Ints]:
    """By row: the hash of its last turn, which covers those before it; its turns; requests left."""
    parts: list[tuple[Digests, Ints, Ints]] = []
    for keys in read_key_arrays(manifest):
        progress = store.progress(keys, manifest.max_new_tokens)
        ends = np.append(keys.chains[1:], len(keys.digests))
        left = np.add.reduceat(progress.turns - progress.over, keys.rows)
        parts.append((keys.digests[ends[keys.rows] - 1], progress.turns[keys.rows], left))
    if not parts:
        return np.empty(0, DIGEST), np.empty(0, np.int64), np.empty(0, np.int64)
    digests, turns, left = (np.concatenate(column) for column in zip(*parts, strict=True))
    return digests, turns, left


def _families(manifest: Manifest, rows: int) -> Ints:
    """Of each row the number of its family, where that is among the largest and has two members."""
    numbers: dict[bytes, int] = {}
    families = np.full(rows, -1, np.int64)
    row = 0
    for batch in _batches(manifest, ["turns", "tools"]):
        texts = zip(batch.column("turns").to_pylist(), batch.column("tools").to_pylist(), strict=True)
        for turns, tools in texts:
            if tools or '"system"' in turns:  # most rows have neither, and are not parsed for it
                start = family_of_start(json_text.loads(turns)[0], json_text.loads(tools) if tools else None)
                if start is not None:
                    families[row] = numbers.setdefault(start, len(numbers))
            row += 1
    members = Counter(families[families >= 0].tolist())
    kept = [number for number, count in members.most_common(_FAMILIES) if count > 1]
    renumbered = np.full(len(numbers) + 1, -1, np.int64)
    renumbered[kept] = range(len(kept))
    return renumbered[families]


def _lengths(manifest: Manifest, families: Ints) -> tuple[Ints, Ints]:
    """Tokens by row, and by family those that all of its rows begin with."""
    lengths: list[Ints] = []
    starts: dict[int, npt.NDArray[np.int32]] = {}
    row = 0
    for batch in _batches(manifest, ["input_ids"]):
        column = batch.column("input_ids")
        ends: Ints = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column) + 1]
        values: npt.NDArray[np.int32] = np.frombuffer(column.values.buffers()[1], np.int32)
        lengths.append(np.diff(ends))
        for place in np.flatnonzero(families[row : row + len(column)] >= 0).tolist():
            ids = values[ends[place] : ends[place + 1]][:_START_TOKENS]
            family = int(families[row + place])
            known = starts.get(family)
            common = ids if known is None else known[: _common(known, ids)]
            if known is None or len(common) < len(known):
                starts[family] = common.copy()
        row += len(column)
    shared = np.array([len(starts[family]) for family in range(len(starts))], np.int64)
    return (np.concatenate(lengths) if lengths else np.empty(0, np.int64)), shared


def _common(left: npt.NDArray[np.int32], right: npt.NDArray[np.int32]) -> int:
    """How many ids both begin with."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def _batches(manifest: Manifest, columns: list[str]) -> Iterator[Any]:
    with pq.ParquetFile(manifest.path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
            if len(batch):
                yield batch
