"""What is known of every answer, in memory: 20 bytes a prompt, whatever their number. Pure.

Prompt hashes lie as sorted 16-byte digests, each with the number of its kind: the few combinations of
status, finish reason and cap that occur. What is learned one by one waits in a small dictionary, until there
is enough of it to be merged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from promptmill.prompts.hashing import DIGEST, Digests, digest

Codes = npt.NDArray[np.uint32]


class Known(NamedTuple):
    """What is kept in memory of an answer."""

    status: str
    finish_reason: str
    max_new_tokens: int


def supersedes(new: Known, old: Known) -> bool:
    """The first answer wins, unless it failed or was cut and the new one had more room."""
    if old.status == "failed":
        return new.status != "failed"
    return (
        new.status != "failed" and old.finish_reason == "length" and new.max_new_tokens > old.max_new_tokens
    )


class Index:
    """Safe to learn and to ask from several threads; `get` never waits for who learns."""

    def __init__(self, merge_at: int = 4096) -> None:
        """`merge_at` answers learned one by one are merged at a time."""
        self._merge_at = merge_at
        self._kinds: list[Known] = []
        self._code_of: dict[Known, int] = {}
        self._table: tuple[Digests, Codes] = np.empty(0, DIGEST), np.empty(0, np.uint32)
        self._new: dict[bytes, int] = {}
        self._learning = threading.RLock()

    def __len__(self) -> int:
        self._merge()
        return len(self._table[0])

    def get(self, prompt_hash: str) -> Known | None:
        key = digest(prompt_hash)
        code = self._new.get(key)
        if code is None:
            digests, codes = self._table  # not by _find, whose arrays take six times as long for one key
            at = int(digests.searchsorted(key))
            if digests[at : at + 1].tobytes() != key:
                return None
            code = int(codes[at])
        return self._kinds[code]

    def learn(self, prompt_hash: str, known: Known) -> None:
        """Take in one answer, if it supersedes what is known."""
        with self._learning:
            old = self.get(prompt_hash)
            if old is None or supersedes(known, old):
                self._new[digest(prompt_hash)] = self.code(known)
                if len(self._new) >= self._merge_at:
                    self._merge()

    def learn_many(self, digests: Digests, codes: Codes) -> None:
        """Take in answers, in order; `codes` are those of their kinds."""
        with self._learning:
            self._merge()
            self._table = self._joined(digests, codes)

    def forget(self, prompt_hashes: Iterable[str]) -> None:
        """These have no answer."""
        with self._learning:
            self._merge()
            digests, codes = self._table
            stay = ~np.isin(digests, np.array([digest(h) for h in prompt_hashes], DIGEST))
            self._table = digests[stay], codes[stay]

    def correct(self, judged: Mapping[str, Known]) -> None:
        """These answers have another status now; one that another took the place of is left as it is."""
        with self._learning:
            self._merge()
            digests, codes = self._table[0], self._table[1].copy()
            keys = np.array([digest(h) for h in judged], DIGEST)
            places = _find((digests, np.arange(len(digests), dtype=np.uint32)), keys)
            for place, known in zip(places.tolist(), judged.values(), strict=True):
                if place >= 0 and self._kinds[codes[place]][1:] == known[1:]:
                    codes[place] = self.code(known)
            self._table = digests, codes

    def code(self, known: Known) -> int:
        """The number of a kind, given to it when it is first seen."""
        with self._learning:
            code = self._code_of.setdefault(known, len(self._kinds))
            if code == len(self._kinds):
                self._kinds.append(known)
            return code

    def look_up(self, digests: Digests, value: Callable[[Known], int], unknown: int) -> npt.NDArray[np.int64]:
        """For each digest the value of its kind, or `unknown`."""
        self._merge()
        codes = _find(self._table, digests)
        values = np.array([*map(value, self._kinds), unknown], np.int64)
        return values[codes]  # no code is -1: the last one

    def dump(self) -> tuple[Digests, Codes, Sequence[Known]]:
        """Everything, as `load` takes it."""
        self._merge()
        return *self._table, self._kinds

    @classmethod
    def load(cls, digests: Digests, codes: Codes, kinds: Sequence[Known]) -> Index:
        index = cls()
        for known in kinds:
            index.code(known)
        index._table = digests, codes
        return index

    def _merge(self) -> None:
        if not self._new:
            return
        with self._learning:
            keys = np.frombuffer(b"".join(self._new), DIGEST)
            self._table = self._joined(keys, np.fromiter(self._new.values(), np.uint32, len(keys)))
            self._new = {}  # only now: who asks looks here first

    def _joined(self, digests: Digests, codes: Codes) -> tuple[Digests, Codes]:
        """The table with these answers in it, one a digest: the one that no later one supersedes."""
        all_digests = np.concatenate([self._table[0], digests])
        all_codes = np.concatenate([self._table[1], codes])
        order = np.argsort(all_digests, kind="stable")
        all_digests, all_codes = all_digests[order], all_codes[order]
        again = np.flatnonzero(all_digests[1:] == all_digests[:-1]) + 1
        if len(again):
            for i in again.tolist():  # in order, so that i - 1 holds the winner so far
                if not supersedes(self._kinds[all_codes[i]], self._kinds[all_codes[i - 1]]):
                    all_codes[i] = all_codes[i - 1]
            last = np.append(all_digests[1:] != all_digests[:-1], True)
            all_digests, all_codes = all_digests[last], all_codes[last]
        return all_digests, all_codes


def _find(table: tuple[Digests, Codes], wanted: Digests) -> npt.NDArray[np.int64]:
    """The code of each, -1 where there is none."""
    digests, codes = table
    found = np.full(len(wanted), -1, np.int64)
    if len(digests):
        places = np.minimum(np.searchsorted(digests, wanted), len(digests) - 1)
        there = digests[places] == wanted
        found[there] = codes[places[there]]
    return found
