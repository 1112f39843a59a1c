"""The index of all segments, kept in a file beside the journal, so that a segment's keys are read once.

Segments never change, so the file holds as long as the segments that it was made of are the oldest ones that
there are. It can be made again at any time: one that is missing, torn or does not fit is passed over.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from promptmill.errors import StoreError
from promptmill.files import written_whole
from promptmill.prompts.hashing import Digests, digests
from promptmill.store.index import Codes, Index, Known
from promptmill.store.segments import KEY_COLUMNS, Segments

_LAYOUT = 1
_KEEP_AT = 64
"""Segments that have to be read before the file is written anew."""


class SegmentIndex:
    """Safe beside other processes that do the same."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, segments: Segments) -> Index:
        """What the segments hold, the first one that has a key winning. Raises StoreError."""
        names = segments.names()
        index, known = self._load(names)
        found = [_arrays(index, table) for table in segments.keys(names[known:])]
        if found:
            index.learn_many(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
            pa.default_memory_pool().release_unused()
        if len(names) - known >= _KEEP_AT:
            with suppress(OSError):  # a shortcut that cannot be kept, is not
                self._save(index, names)
        return index

    def _load(self, names: Sequence[str]) -> tuple[Index, int]:
        """The kept index, and of how many of `names` it is; an empty one where it is none of theirs."""
        try:
            with self.path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                about = json.loads(file["about"].tobytes())
                n = about["segments"]
                if about["layout"] == _LAYOUT and about["names"] == _digest(names[:n]):
                    kinds = [Known(*kind) for kind in about["kinds"]]
                    return Index.load(file["digests"], file["codes"], kinds), n
        except (OSError, EOFError, ValueError, LookupError, TypeError, zipfile.BadZipFile):
            pass
        return Index(), 0

    def _save(self, index: Index, names: Sequence[str]) -> None:
        keys, codes, kinds = index.dump()
        about = {"layout": _LAYOUT, "segments": len(names), "names": _digest(names), "kinds": kinds}
        with written_whole(self.path) as file:
            text = np.frombuffer(json.dumps(about).encode(), np.uint8)
            np.savez(file, about=text, digests=keys, codes=codes)


def _arrays(index: Index, table: Any) -> tuple[Digests, Codes]:
    try:
        return digests(table.column("prompt_hash").combine_chunks()), _codes(index, table)
    except ValueError as error:
        raise StoreError(f"a segment holds what is none of ours: {error}") from None


def _codes(index: Index, table: Any) -> Codes:
    """The code of each row's kind; the kinds are few."""
    parts = [table.column(name).combine_chunks().dictionary_encode() for name in KEY_COLUMNS[1:]]
    # From the buffers: np.asarray of an Arrow array imports pandas, a second and 60 MB.
    numbers = np.stack([np.frombuffer(part.indices.buffers()[1], np.int32) for part in parts], axis=1)
    kinds, which = np.unique(numbers, axis=0, return_inverse=True)
    values = [part.dictionary.to_pylist() for part in parts]
    codes = [index.code(Known(*(v[i] for v, i in zip(values, kind, strict=True)))) for kind in kinds]
    return np.array(codes, np.uint32)[which.reshape(-1)]


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()
