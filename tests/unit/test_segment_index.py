"""The kept index of all segments: read once, and never believed against what lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from promptmill.store import segment_index
from promptmill.store.index import Index, Known
from promptmill.store.objects import LocalFolder
from promptmill.store.segment_index import SegmentIndex
from promptmill.store.segments import Segments
from tests.helpers_store import answer, cut, failed, sha

DONE = Known("answered", "stop", 64)


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.segments = Segments(LocalFolder(str(folder / "store")))
        self.index = SegmentIndex(folder / "keys.npz")
        self.read_names: list[str] = []
        self._time = 0

    def read(self) -> Index:
        return self.index.read(self.segments)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Keeps the index at once, writes segments a millisecond apart, and knows which ones are opened."""
    monkeypatch.setattr(segment_index, "_KEEP_AT", 1)
    here = Place(tmp_path)
    now = iter(range(5_000_000, 10**12, 1_000_000))
    monkeypatch.setattr("promptmill.store.segments.time.time_ns", lambda: next(now))
    keys = Segments.keys

    def keys_seen(self: Segments, names: Sequence[str]) -> Any:
        here.read_names = list(names)
        return keys(self, names)

    monkeypatch.setattr(Segments, "keys", keys_seen)
    return here


def test_index_of_segments_is_read_once_and_then_only_what_is_new(place: Place) -> None:
    first = [place.segments.write("P", [answer(sha(f"{n}-{i}")) for i in range(20)]) for n in range(3)]
    assert len(place.read()) == 60
    assert place.read_names == first
    place.read()
    assert place.read_names == []
    new = place.segments.write("Q", [answer(sha("new"))])
    index = place.read()
    assert place.read_names == [new]
    assert (len(index), index.get(sha("new")), index.get(sha("2-19"))) == (61, DONE, DONE)


def test_index_of_segments_lets_the_first_win_and_a_better_one_later(place: Place) -> None:
    place.segments.write("P", [cut(sha("cut"), 32), failed(sha("failed")), answer(sha("done"))])
    for _ in range(2):
        index = place.read()
        assert index.get(sha("cut")) == Known("truncated", "length", 32)
    place.segments.write("P", [cut(sha("cut"), 64), answer(sha("failed")), failed(sha("done"))])
    index = place.read()
    assert index.get(sha("cut")) == Known("truncated", "length", 64)
    assert index.get(sha("failed")) == index.get(sha("done")) == DONE


def test_index_of_segments_that_are_gone_or_came_in_between_is_made_anew(place: Place) -> None:
    names = [place.segments.write("P", [answer(sha(str(n)))]) for n in range(3)]
    assert len(place.read()) == 3
    (place.folder / "store" / names[1]).unlink()
    index = place.read()
    assert place.read_names == [names[0], names[2]]
    assert (len(index), index.get(sha("1"))) == (2, None)
    older = place.folder / "store/segments/P/00000000000001-00000000.parquet"
    older.write_bytes((place.folder / "store" / names[0]).read_bytes())
    place.read()
    assert len(place.read_names) == 3


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def damaged(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"answered", b"answerer"))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, other=np.arange(3))


@pytest.mark.parametrize("breakage", [torn, damaged, empty, foreign])
def test_index_of_segments_that_is_damaged_is_passed_over(
    place: Place, breakage: Callable[[Path], None]
) -> None:
    names = [place.segments.write("P", [answer(sha(str(n)))]) for n in range(3)]
    place.read()
    breakage(place.index.path)
    index = place.read()
    assert place.read_names == names
    assert [index.get(sha(str(n))) for n in range(3)] == [DONE] * 3


def test_index_of_few_new_segments_is_not_written_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_index, "_KEEP_AT", 3)
    place.segments.write("P", [answer(sha("a"))])
    place.read()
    assert not place.index.path.exists()
