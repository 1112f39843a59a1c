"""Segments: immutable, whole, and an error that names the file where one is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from promptmill.errors import StoreError
from promptmill.store.objects import LocalFolder
from promptmill.store.segments import KEY_COLUMNS, SCHEMA, Segments
from tests.helpers_store import answer, cut, failed, sha


@pytest.fixture
def segments(tmp_path: Path) -> Segments:
    return Segments(LocalFolder(str(tmp_path)))


def test_write_keeps_every_field(segments: Segments) -> None:
    given = [
        answer(sha("a"), flags=["clipped"], content="naïve 🦊", output_ids=list(range(5000))),
        cut(sha("b"), 64),
        failed(sha("c"), error="killed the server"),
    ]
    name = segments.write("P", given)
    assert name.startswith("segments/P/")
    assert segments.names() == [name]
    found = list(segments.lookup({a.prompt_hash for a in given}, [name]))
    assert sorted(found, key=lambda a: a.prompt_hash) == sorted(given, key=lambda a: a.prompt_hash)
    (keys,) = segments.keys([name])
    assert keys.to_pylist() == [{column: getattr(a, column) for column in KEY_COLUMNS} for a in given]


def test_lookup_gives_only_what_was_asked_for_across_row_groups(segments: Segments) -> None:
    name = segments.write("P", [answer(sha(str(i))) for i in range(1201)])
    wanted = {sha("0"), sha("700"), sha("1200"), sha("none")}
    assert {a.prompt_hash for a in segments.lookup(wanted, [name])} == wanted - {sha("none")}
    assert list(segments.lookup(set(), [name])) == []


def test_flagged_gives_the_hashes_with_that_flag(segments: Segments) -> None:
    name = segments.write("P", [answer(sha("a"), flags=["x", "y"]), answer(sha("b"), flags=["y"])])
    assert list(segments.flagged("x", [name])) == [sha("a")]
    assert list(segments.flagged("z", [name])) == []


def test_names_are_oldest_first_across_partitions_and_nothing_else(
    segments: Segments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((3_000_000_000, 1_000_000_000, 2_000_000_000))
    monkeypatch.setattr("promptmill.store.segments.time.time_ns", lambda: next(now))
    third, first, second = (segments.write(p, [answer(sha("a"))]) for p in ("A", "C", "B"))
    (tmp_path / "segments/A/notes.txt").write_text("not a segment")
    assert segments.names() == [first, second, third]


def test_write_that_cannot_be_made_is_a_store_error_that_names_it(segments: Segments, tmp_path: Path) -> None:
    (tmp_path / "segments").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match=r"segments/P/\d+-[0-9a-f]{8}\.parquet"):
        segments.write("P", [answer(sha("a"))])


def torn(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def empty(whole: bytes) -> bytes:
    return b""


def damaged_inside(whole: bytes) -> bytes:
    return whole[:4] + b"\xff" * (len(whole) // 2) + whole[4 + len(whole) // 2 :]


def foreign(whole: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": ["a", "b"]}), sink)
    return sink.getvalue().to_pybytes()


def half_foreign(whole: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    columns = {field.name: [None] for field in SCHEMA if field.name in (*KEY_COLUMNS, "flags")}
    pq.write_table(pa.table({**columns, "prompt_hash": [sha("a")]}), sink)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("breakage", [torn, empty, damaged_inside, foreign])
def test_broken_segment_is_a_store_error_that_names_the_file(
    segments: Segments, tmp_path: Path, breakage: Callable[[bytes], bytes]
) -> None:
    name = segments.write("P", [answer(sha(str(i)), output_ids=[i] * 9) for i in range(300)])
    (tmp_path / name).write_bytes(breakage((tmp_path / name).read_bytes()))
    for read in (
        lambda: list(segments.keys([name])),
        lambda: list(segments.lookup({sha("1")}, [name])),
        lambda: list(segments.flagged("x", [name])),
    ):
        with pytest.raises(StoreError, match=rf"{name} cannot be read.*Move it away"):
            read()


def test_segment_without_all_columns_is_a_store_error_on_lookup(segments: Segments, tmp_path: Path) -> None:
    name = segments.write("P", [answer(sha("a"))])
    (tmp_path / name).write_bytes(half_foreign(b""))
    with pytest.raises(StoreError, match=name):
        list(segments.lookup({sha("a")}, [name]))


def test_segment_with_a_column_of_a_later_version_is_read(segments: Segments, tmp_path: Path) -> None:
    given = answer(sha("a"))
    name = segments.write("P", [given])
    with pq.ParquetFile(tmp_path / name) as file:
        table = file.read().append_column("new", pa.array([1]))
    pq.write_table(table, tmp_path / name)
    assert list(segments.lookup({sha("a")}, [name])) == [given]


def test_segment_that_vanished_is_a_store_error_that_names_it(segments: Segments, tmp_path: Path) -> None:
    name = segments.write("P", [answer(sha("a"))])
    (tmp_path / name).unlink()
    with pytest.raises(StoreError, match=name) as caught:
        list(segments.keys([name]))
    assert "Move it away" not in str(caught.value)
