"""The answers of a store, read as they are asked for: of the segments only those that hold what is wanted."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import numpy.typing as npt

from promptmill.prompts.hashing import DIGEST, Digests, digest, digests
from promptmill.store.index import Known, supersedes
from promptmill.store.journal import JournalReader
from promptmill.store.segments import Segments
from promptmill.types import Answer


class Answers:
    """Holds where each answer lies, 24 bytes a row, and no answer. The store may grow meanwhile."""

    def __init__(self, segments: Segments, journal: JournalReader | None) -> None:
        self._segments = segments
        self._journal = journal
        self._names: list[str] = []
        self._digests: Digests = np.empty(0, DIGEST)
        self._places: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def lookup(self, wanted: Set[str]) -> dict[str, Answer]:
        """The winning answer to each of `wanted` that has one. Raises StoreError."""
        found = self._read(wanted)
        if len(found) < len(wanted):  # the first time; and where one was sealed meanwhile
            self._locate()
            found = self._read(wanted)
        return found

    def _read(self, wanted: Set[str]) -> dict[str, Answer]:
        found: dict[str, Answer] = {}
        # First: an answer moves from there to a segment, never back.
        journaled = list(self._journal.lookup(sorted(wanted))) if self._journal else []
        for answer in (*self._segments.lookup(wanted, self._holding(wanted)), *journaled):
            old = found.get(answer.prompt_hash)
            if old is None or supersedes(known_of(answer), known_of(old)):
                found[answer.prompt_hash] = answer
        return found

    def _locate(self) -> None:
        self._names = self._segments.names()
        columns = [digests(hashes) for hashes in self._segments.hashes(self._names)]
        if columns:
            everything = np.concatenate(columns)
            order = np.argsort(everything, kind="stable")
            self._digests = everything[order]
            self._places = np.repeat(np.arange(len(columns)), [len(column) for column in columns])[order]

    def _holding(self, wanted: Set[str]) -> list[str]:
        """The segments with rows of `wanted`, oldest first."""
        keys = np.array([digest(prompt_hash) for prompt_hash in wanted], DIGEST)
        first = np.searchsorted(self._digests, keys, "left")
        after = np.searchsorted(self._digests, keys, "right")
        places: set[int] = set()
        while (here := first < after).any():  # more than once only where a prompt was answered twice
            first, after = first[here], after[here]
            places.update(self._places[first].tolist())
            first = first + 1
        return [self._names[place] for place in sorted(places)]


def known_of(answer: Answer) -> Known:
    return Known(answer.status, answer.finish_reason, answer.max_new_tokens)
