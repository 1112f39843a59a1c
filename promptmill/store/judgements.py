"""What answers were found to be when they were looked at again: a layer over segments that never change.

    judgements/current.json                      {"layer": …}, put last
    judgements/<layer>/segments/<partition>/…    the answers that are judged otherwise, without their ids

A layer is made whole from the ids of all answers, so the newest one holds alone. Text, flags and status come
from it; ids, and everything that was measured, from the answer itself.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from promptmill.errors import StoreError
from promptmill.prompts.hashing import digest
from promptmill.store.answers import Answers
from promptmill.store.index import Index, Known
from promptmill.store.objects import Folder, open_folder
from promptmill.store.segments import KEY_COLUMNS, Segments
from promptmill.types import Answer

_FOLDER = "judgements"
_POINTER = f"{_FOLDER}/current.json"
DERIVED = ("status", "flags", "reasoning", "content", "reasoning_tokens")
"""The fields of an answer that are derived from its ids."""


class Judgements:
    """The layer of a store, if there is one."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.layer = ""
        """Its name; empty where answers stand as they were judged first."""
        self._judged: set[bytes] = set()
        """Digests of the prompts whose answers it holds."""
        self._segments: Segments | None = None
        self._answers: Answers | None = None

    def refresh(self, index: Index) -> None:
        """Find the layer in force, and correct what `index` knows. Raises StoreError."""
        self.layer = self._read_pointer()
        self._judged = set()
        self._segments = self._answers = None
        if not self.layer:
            return
        self._segments = segments = self._layer(self.layer)
        for table in segments.keys(segments.names()):
            rows = zip(*(table.column(name).to_pylist() for name in KEY_COLUMNS), strict=True)
            known = {prompt_hash: Known(*kind) for prompt_hash, *kind in rows}
            index.correct(known)
            self._judged.update(map(digest, known))
        self._answers = Answers(segments, None)

    def over(self, answers: Mapping[str, Answer]) -> dict[str, Answer]:
        """These answers, by prompt hash, as they are judged now."""
        there = {h for h in answers if digest(h) in self._judged}
        if not there or self._answers is None:
            return dict(answers)
        judged = self._answers.lookup(there)
        return {h: _corrected(answer, judged.get(h)) for h, answer in answers.items()}

    def with_flag(self, name: str, raw: set[str]) -> set[str]:
        """The answers with this flag or status; `raw` are those that had it as they were judged first."""
        if self._segments is None:
            return raw
        untouched = {h for h in raw if digest(h) not in self._judged}
        return untouched | set(self._segments.flagged(name, self._segments.names()))

    def flags(self) -> set[str]:
        """Every flag that an answer has by it."""
        return self._segments.flags(self._segments.names()) if self._segments is not None else set()

    def write(self, answers: Iterable[tuple[str, list[Answer]]]) -> str:
        """Make a layer of answers as they are judged now, some of a partition at a time, and put it in force.

        Without any, answers stand as they were judged first. Returns its name. Raises StoreError.
        """
        layer = f"{time.time_ns() // 1_000_000:014d}-{uuid.uuid4().hex[:8]}"
        segments, n = self._layer(layer), 0
        for partition, some in answers:
            segments.write(partition, [replace(answer, prompt_ids=[], output_ids=[]) for answer in some])
            n += len(some)
        before = self._read_pointer()
        layer = layer if n else ""
        if layer or before:
            self._folder.put_bytes(json.dumps({"layer": layer}).encode(), _POINTER)
        for name in self._folder.names(_FOLDER):  # of layers that nothing points to any more
            if name != _POINTER and not (layer and name.startswith(f"{_FOLDER}/{layer}/")):
                self._folder.delete(name)
        return layer

    def _layer(self, layer: str) -> Segments:
        return Segments(open_folder(self._folder.address(f"{_FOLDER}/{layer}")))

    def _read_pointer(self) -> str:
        pointer = self._folder.read_bytes(_POINTER)
        if pointer is None:
            return ""
        try:
            return str(json.loads(pointer)["layer"])
        except (ValueError, LookupError, TypeError):
            raise StoreError(
                f"{self._folder.address(_POINTER)} cannot be read: move it away, and run promptmill reflag."
            ) from None


def differs(one: Answer, other: Answer) -> bool:
    return any(getattr(one, name) != getattr(other, name) for name in DERIVED)


def _corrected(answer: Answer, judged: Answer | None) -> Answer:
    # Not of one that has taken the place of the answer that was looked at.
    if judged is None or judged.created_at != answer.created_at:
        return answer
    derived: dict[str, Any] = {name: getattr(judged, name) for name in DERIVED}
    return replace(answer, **derived)


def in_parts(answers: Iterable[Answer], size: int) -> Iterator[tuple[str, list[Answer]]]:
    """Some of one partition at a time."""
    waiting: dict[str, list[Answer]] = {}
    for answer in answers:
        some = waiting.setdefault(answer.partition, [])
        some.append(answer)
        if len(some) == size:
            yield answer.partition, waiting.pop(answer.partition)
    yield from waiting.items()
