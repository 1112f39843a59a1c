from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import write_lines

from promptmill.errors import ConfigError
from promptmill.prompts import arrays
from promptmill.prompts.readers import RawRow, read_rows
from promptmill.prompts.sources import fingerprint, list_files
from promptmill.types import Reject


def read(path: Path, content: bytes) -> list[Any]:
    """Rows as their data, rejects as (line, reason)."""
    path.write_bytes(content)
    found: list[Any] = []
    for row in read_rows([path]):
        line = row.location.removeprefix(f"{path}:")
        found.append((line, row.reason) if isinstance(row, Reject) else row.data)
    return found


def zst(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def many(n: int = 300) -> bytes:
    """Lines that do not compress to nothing."""
    return b"".join(b'{"id": %d, "noise": "%x"}\n' % (i, pow(7, i + 900, 1 << 900)) for i in range(n))


def test_source_lines_skip_blank_ones_and_number_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"id": 1}\n  \t\n\r\n{"id": 2}\r\n\n')
    assert list(read_rows([path])) == [RawRow(f"{path}:2", {"id": 1}), RawRow(f"{path}:5", {"id": 2})]


def test_source_last_line_needs_no_newline(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", b'{"id": 1}\n{"id": 2}') == [{"id": 1}, {"id": 2}]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"[]", b"\xef\xbb\xbf"])
def test_source_empty_has_no_rows(tmp_path: Path, content: bytes) -> None:
    assert read(tmp_path / "a.jsonl", content) == []


def test_source_cut_last_line_is_one_reject(tmp_path: Path) -> None:
    content = b'{"id": 1}\n{"id": bad}\n{"id": "cut in the mid'
    assert read(tmp_path / "a.jsonl", content) == [{"id": 1}, ("2", "bad_json"), ("3", "cut_line")]


def test_source_lines_that_are_no_objects_are_rejects(tmp_path: Path) -> None:
    content = b'{"id": 1}\n["not","an","object"]\n"string"\nnull\n42\n{"id": 2}\n'
    rejects = [(str(n), "not_an_object") for n in (2, 3, 4, 5)]
    assert read(tmp_path / "a.jsonl", content) == [{"id": 1}, *rejects, {"id": 2}]


def test_source_reads_on_after_an_array_on_the_first_line(tmp_path: Path) -> None:
    content = b'["not","an","object"]\n\n{"id": 1}\n{"id": 2'
    expected = [("1", "not_an_object"), {"id": 1}, ("4", "cut_line")]
    assert read(tmp_path / "a.jsonl", content) == expected


def test_source_array_file_gives_its_items(tmp_path: Path) -> None:
    content = b'\n [\n {"id": "j1"},\n 5,\n {"id": "j2"}\n]'
    assert read(tmp_path / "a.json", content) == [{"id": "j1"}, ("2", "not_an_object"), {"id": "j2"}]


@pytest.mark.parametrize(
    ("end", "reject"),
    [
        (b', {"id": "j', ("2", "cut_line")),
        (b', {"id": tru', ("2", "cut_line")),
        (b", ", ("2", "cut_line")),
        (b"", ("2", "cut_line")),
        (b' {"id": 2}]', ("2", "bad_json")),
        (b', {"id": x, "more": "%s"}]' % (b"y" * 99), ("2", "bad_json")),
        (b', {"id": "\xff"}]', ("2", "bad_json")),
        (b', {"n": %s}]' % (b"7" * 5000), ("2", "bad_json")),
        (b', {"n": %s]' % (b"[" * 100_000), ("2", "bad_json")),
        (b"] 7", ("2", "bad_json")),
    ],
)
def test_source_torn_array_file_keeps_what_comes_before(
    tmp_path: Path, end: bytes, reject: tuple[str, str]
) -> None:
    assert read(tmp_path / "a.json", b'[\n {"id": "j1"}\n' + end) == [{"id": "j1"}, reject]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_source_array_is_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(arrays, "_BLOCK", block)
    items = [{"id": i, "text": 'föx 🦊 \\ " ]} ' * i, "n": [1.5, None, True]} for i in range(9)]
    content = json.dumps(items, ensure_ascii=False, indent=40)
    assert read(tmp_path / "a.json", content.encode()) == items


def test_source_numbers_keep_their_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1180591620717411303425, "m": -0.0, "k": 18446744073709551615, "x": 1e3}')
    (row,) = read_rows([path])
    assert isinstance(row, RawRow)
    assert (
        json.dumps(row.data)
        == '{"n": 1180591620717411303425, "m": -0.0, "k": 18446744073709551615, "x": 1000.0}'
    )


def test_source_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    assert read(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"id": 1}\n') == [{"id": 1}]
    assert read(tmp_path / "a.json", b'\xef\xbb\xbf[{"id": 1}]') == [{"id": 1}]


def test_source_infers_no_types(tmp_path: Path) -> None:
    texts = ["2", "007", "true", "null", '{"a":1}', "2026-01-01", "1e5"]
    path = write_lines(tmp_path / "a.jsonl", [*({"v": text} for text in texts), {"v": 7}, {"v": [{"a": 1}]}])
    rows = [row.data["v"] for row in read_rows([path]) if isinstance(row, RawRow)]
    assert rows == [*texts, 7, [{"a": 1}]]


def test_source_column_may_change_its_type(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"v": None}] * 50 + [{"v": "text"}, {"v": {"a": 1}}, {"w": 1}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert [row.data for row in read_rows([path]) if isinstance(row, RawRow)] == rows


def test_source_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    lines = [
        rb'{"v": "half a pair: \ud83d end"}',
        rb'{"v": "good pair: \ud83d\ude80"}',
        rb'{"v": ["escaped byte: \udc97"], "\udc97": 1}',
        rb'{"v": "nul \u0000 inside"}',
        rb'{"v": "\u202eRTL\u202c \u200bzero width \ufeff"}',
        rb'{"v": "e\u0301 vs \u00e9"}',
    ]
    assert read(tmp_path / "a.jsonl", b"\n".join(lines)) == [
        {"v": "half a pair: \ufffd end"},
        {"v": "good pair: 🚀"},
        {"v": ["escaped byte: \ufffd"], "\ufffd": 1},
        {"v": "nul \0 inside"},
        {"v": "\u202eRTL\u202c \u200bzero width \ufeff"},
        {"v": "e\u0301 vs é"},
    ]


@pytest.mark.parametrize("depth", [300, 800])
def test_source_array_items_may_be_nested_as_lines_may(tmp_path: Path, depth: int) -> None:
    item = rb'{"v": "\ud83d", "deep": ' + b"[" * depth + b"]" * depth + b"}"
    for content in (b"[%b, %b]" % (item, item), b"%b\n%b\n" % (item, item)):
        assert [row["v"] for row in read(tmp_path / "a.json", content)] == ["\ufffd"] * 2


def test_source_odd_bytes_and_deep_nesting_are_rejects(tmp_path: Path) -> None:
    deep = b'{"v": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    content = b'{"v": "\xff"}\n' + deep + b'\n{"v": NaN, "id": 1}\n'
    rows = read(tmp_path / "a.jsonl", content)
    assert rows[:2] == [("1", "bad_json"), ("2", "bad_json")]
    assert rows[2]["id"] == 1


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_source_compression_is_told_by_content(tmp_path: Path, pack: Any) -> None:
    assert read(tmp_path / "plain-name.jsonl", pack(b'{"id": 1}\n{"id": 2}')) == [{"id": 1}, {"id": 2}]
    assert read(tmp_path / "array.jsonl", pack(b'[{"id": 1}]')) == [{"id": 1}]
    assert read(tmp_path / "not.jsonl.gz", b'{"id": 1}\n') == [{"id": 1}]


@pytest.mark.parametrize("pack", [gzip.compress, zst])
def test_source_joined_archives_are_read_to_the_end(tmp_path: Path, pack: Any) -> None:
    assert len(read(tmp_path / "a.jsonl.x", pack(many()) + pack(many()))) == 600


@pytest.mark.parametrize("pack", [gzip.compress, zst])
@pytest.mark.parametrize("array", [False, True])
def test_source_cut_archive_stops_with_its_name(tmp_path: Path, pack: Any, array: bool) -> None:
    whole = b"[" + many().replace(b"}\n", b"},\n") + b"{}]" if array else many()
    packed = pack(whole)
    with pytest.raises(ConfigError, match=r"cut\.jsonl: the compressed file breaks off after \d+ lines"):
        read(tmp_path / "cut.jsonl", packed[: len(packed) // 2])


def test_source_damaged_gzip_stops_with_its_name(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(many()))
    packed[-8:-4] = b"\0\0\0\0"  # the checksum
    with pytest.raises(ConfigError, match=r"a\.gz: the compressed file breaks off"):
        read(tmp_path / "a.gz", bytes(packed))


def test_source_parquet_is_told_by_content(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    rows = [{"id": "007", "turns": ["a", "b"]}, {"id": None, "turns": None}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    assert list(read_rows([path])) == [RawRow(f"{path}:1", rows[0]), RawRow(f"{path}:2", rows[1])]


def test_source_cut_parquet_stops_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"v": ["x"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet: not a whole Parquet file, after 0 rows"):
        list(read_rows([path]))


def test_source_parquet_with_damaged_names_stops_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"prompt", b"pr\xa3mpt"))
    with pytest.raises(
        ConfigError, match=r"a\.parquet: not a whole Parquet file, after 0 rows: 'utf-8' codec"
    ):
        list(read_rows([path]))


def test_source_parquet_value_without_a_form_in_python_costs_its_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\4\0\0\0"), pa.py_buffer(b"\xff\xfeok")]
    )
    pq.write_table(pa.table({"id": ["a", "b"], "prompt": texts}), path)
    first, second = (row.data for row in read_rows([path]) if isinstance(row, RawRow))
    assert (first["id"], second) == ("a", {"id": "b", "prompt": "ok"})
    assert not isinstance(first["prompt"], str)


def test_source_directory_is_searched_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("b.jsonl", "a.json.gz", "sub/c.parquet", "sub/d.ndjson.zst")
    for name in (*names, "readme.md", ".hidden.jsonl", ".git/e.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    found = [str(p.relative_to(tmp_path / "in")) for p in list_files(str(tmp_path / "in"))]
    assert found == ["a.json.gz", "b.jsonl", "sub/c.parquet", "sub/d.ndjson.zst"]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert len(list_files("../in")) == 4


def test_source_glob_is_sorted_and_a_file_may_look_like_one(tmp_path: Path) -> None:
    for name in ("part[1].jsonl", "part-2.jsonl", "part-1.jsonl", "other.jsonl"):
        (tmp_path / name).touch()
    assert [p.name for p in list_files(f"{tmp_path}/part-*.jsonl")] == ["part-1.jsonl", "part-2.jsonl"]
    assert [p.name for p in list_files(f"{tmp_path}/part[1].jsonl")] == ["part[1].jsonl"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("none.jsonl", r"there is no such file or directory in /.+\."),
        ("/none.jsonl", r"there is no such file or directory\."),
        ("none-*.jsonl", "no file matches"),
        ("empty", "the directory holds no prompt file"),
        ("ftp://host/a.jsonl", "local paths, s3:// and hf://"),
    ],
)
def test_source_without_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        list_files(source)


def test_source_fingerprint_follows_name_size_and_time(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"id": 1}])
    first = fingerprint([path])
    assert fingerprint([path]) == first
    os.utime(path, ns=(1, 1))
    touched = fingerprint([path])
    path.write_bytes(b'{"id": 22}\n')
    os.utime(path, ns=(1, 1))
    resized = fingerprint([path])
    moved = path.rename(tmp_path / "b.jsonl")
    assert len({first, touched, resized, fingerprint([moved]), fingerprint([])}) == 5
