"""Files of prompts as a stream of rows. Types are never inferred: a value is what the file says.

Compression and Parquet are told by magic bytes, not by name. In memory is a row, or a few hundred of
Parquet's.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from promptmill.errors import ConfigError
from promptmill.prompts import json_text, remote
from promptmill.prompts.arrays import Broken, array_items, starts_with_array
from promptmill.prompts.sources import File
from promptmill.types import Reject

_BATCH = 256
_HEAD = 1 << 20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class RawRow:
    """One object of a source, with nothing assumed about it."""

    location: str
    data: dict[str, Any]
    replaced: bool = False
    """Whether a lone surrogate in it became U+FFFD."""


def read_rows(files: Iterable[File]) -> Iterator[RawRow | Reject]:
    """Every row of `files` in order: as an object, or as a reject with its place and reason.

    Raises ConfigError for a file that cannot be opened or breaks off inside its compression.
    """
    for file in files:
        with remote.translated(file) if isinstance(file, remote.RemoteFile) else nullcontext():
            try:
                with file.open("rb") as stream:
                    yield from _read(file, stream)
            except OSError as error:
                if isinstance(file, remote.RemoteFile):
                    raise
                raise ConfigError(f"source {file}: cannot be read: {error.strerror or error}.") from None


def _read(file: File, stream: IO[bytes]) -> Iterator[RawRow | Reject]:
    magic = stream.read(4)
    stream.seek(0)
    if magic == b"PAR1":
        yield from _read_parquet(file, stream)
    else:
        yield from _read_text(file, stream, magic)


def _read_parquet(file: File, stream: IO[bytes]) -> Iterator[RawRow | Reject]:
    n = 0
    try:
        # Page by page: a row group is often all of a file, and Arrow would fetch it whole.
        with pq.ParquetFile(stream, pre_buffer=False, buffer_size=_HEAD) as parquet:
            for batch in parquet.iter_batches(batch_size=_BATCH):
                for data in _objects(batch):
                    n += 1
                    yield RawRow(f"{file}:{n}", data)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: names that are no UTF-8
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's, not Parquet's
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"source {file}: not a whole Parquet file, after {n} rows: {first}.") from None


class Unreadable:
    """Stands for a value that Python has no form of: text that is no UTF-8, a date in the year 300,000.

    No format takes it, so that a row that needs it is rejected, and no other.
    """


def _objects(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        columns = {name: [_value(v) for v in batch.column(i)] for i, name in enumerate(batch.schema.names)}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return rows


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException):
        return Unreadable()


def _read_text(file: File, raw: IO[bytes], magic: bytes) -> Iterator[RawRow | Reject]:
    n = 0
    with _plain(raw, magic) as stream:
        try:
            if _first_byte(stream) == b"[" and starts_with_array(stream.peek(_HEAD)):
                yield from _read_array(file, stream)
                return
            for n, line in enumerate(stream, 1):
                if line.strip():
                    yield _parse_line(f"{file}:{n}", line)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and (
                error.errno is not None or not (magic[:2] == _GZIP or magic == _ZSTD)
            ):
                raise  # the disk's, not the compression's
            raise ConfigError(
                f"source {file}: the compressed file breaks off after {n} lines ({error}). "
                "Fetch it again, or decompress what is there and name that file."
            ) from None


def _plain(raw: IO[bytes], magic: bytes) -> io.BufferedReader:
    stream: Any = raw
    if magic[:2] == _GZIP:
        stream = gzip.GzipFile(fileobj=raw)
    elif magic == _ZSTD:
        # The package zstandard ends in silence where a file is cut; Arrow says so.
        stream = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")
    # Whatever is asked of a cut archive at once is lost: a little, so that lines are counted to near its end.
    return io.BufferedReader(cast(io.RawIOBase, stream), _HEAD if stream is raw else io.DEFAULT_BUFFER_SIZE)


def _first_byte(stream: io.BufferedReader) -> bytes:
    """The first byte that is neither white space nor a byte order mark; both are left unread or dropped."""
    if stream.peek(3)[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    for byte in stream.peek(4096):
        if not bytes([byte]).isspace():
            return bytes([byte])
    return b""


def _read_array(file: File, stream: IO[bytes]) -> Iterator[RawRow | Reject]:
    n = 0
    try:
        for n, (item, replaced) in enumerate(array_items(stream), 1):
            yield _as_row(f"{file}:{n}", item, replaced)
    except Broken as error:
        yield Reject(f"{file}:{n + 1}", error.reason, f"{error}; what follows is not read")


def _parse_line(location: str, line: bytes) -> RawRow | Reject:
    try:
        return _as_row(location, *json_text.parse(line))
    except ValueError as error:
        if not line.endswith(b"\n"):
            return Reject(location, "cut_line", f"the last line is not whole JSON: {error}")
        return Reject(location, "bad_json", str(error))


def _as_row(location: str, item: object, replaced: bool) -> RawRow | Reject:
    if isinstance(item, dict):
        return RawRow(location, item, replaced)
    return Reject(location, "not_an_object", f"expected an object, found {type(item).__name__}")
