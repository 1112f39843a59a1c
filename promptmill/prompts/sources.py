"""Files of prompts, read as a stream of rows. Types are never inferred: a value is what the file says.

Compression is told by magic bytes, not by name. JSON is read by orjson, and what orjson refuses (lone
surrogates, NaN) by the standard library; lone surrogates become U+FFFD.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from promptmill.errors import ConfigError
from promptmill.types import Reject

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One object of a source, with nothing assumed about it."""

    location: str
    data: dict[str, Any]


def list_files(source: str) -> list[Path]:
    """The files of `source`: a file, a directory (searched through) or a glob; sorted.

    Raises ConfigError where there is none.
    """
    if "://" in source:
        raise ConfigError(f"source {source!r}: only local files, directories and globs can be read.")
    path = Path(source)
    if path.is_dir():
        inside = (p for p in sorted(path.rglob("*")) if p.is_file())
        found = [p for p in inside if _is_prompt_file(p.relative_to(path))]
        kinds = ", ".join(SUFFIXES)
        problem = f"the directory holds no prompt file ({kinds}, also with .gz or .zst)"
    elif any(c in source for c in "*?[") and not path.is_file():
        found = [Path(p) for p in sorted(glob.glob(source, recursive=True)) if Path(p).is_file()]  # noqa: PTH207  a source is a whole pattern, not a pattern below a folder
        problem = "no file matches"
    else:
        found = [path] if path.is_file() else []
        problem = "there is no such file or directory"
    if not found:
        raise ConfigError(f"source {source!r}: {problem}.")
    return found


def fingerprint(files: list[Path]) -> str:
    """Changes when a file is added, removed, renamed, resized or rewritten; contents are not read."""
    seen = [(str(f), (stat := f.stat()).st_size, stat.st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def read_rows(files: list[Path]) -> Iterator[RawRow | Reject]:
    """Every row of `files` in order: as an object, or as a reject with its place and reason.

    Raises ConfigError for a file that cannot be opened or breaks off inside its compression.
    """
    for path in files:
        try:
            with path.open("rb") as raw:
                magic = raw.read(4)
            if magic == b"PAR1":
                yield from _read_parquet(path)
            else:
                yield from _read_text(path, magic)
        except OSError as error:
            raise ConfigError(f"source {path}: cannot be read: {error.strerror or error}.") from None


def _is_prompt_file(path: Path) -> bool:
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(SUFFIXES) and not any(part.startswith(".") for part in path.parts)


def _read_parquet(path: Path) -> Iterator[RawRow | Reject]:
    n = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for data in batch.to_pylist():
                    n += 1
                    yield RawRow(f"{path}:{n}", data)
    except pa.ArrowException as error:
        raise ConfigError(f"source {path}: not a whole Parquet file, after {n} rows: {error}.") from None


def _read_text(path: Path, magic: bytes) -> Iterator[RawRow | Reject]:
    n = 0
    with _open_text(path, magic) as stream:
        try:
            if _first_byte(stream) == b"[":
                yield from _read_array(path, stream)
                return
            for n, line in enumerate(stream, 1):
                if line.strip():
                    yield _parse_line(f"{path}:{n}", line)
        except (EOFError, zlib.error, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # the disk's, not the compression's
            raise ConfigError(
                f"source {path}: the compressed file breaks off after {n} lines ({error}). "
                "Fetch it again, or decompress what is there and name that file."
            ) from None


def _open_text(path: Path, magic: bytes) -> io.BufferedReader:
    if magic[:2] == b"\x1f\x8b":
        return io.BufferedReader(cast(io.RawIOBase, gzip.open(path, "rb")))
    if magic == b"\x28\xb5\x2f\xfd":
        # The package zstandard ends in silence where a file is cut; Arrow says so.
        return io.BufferedReader(cast(io.RawIOBase, pa.input_stream(str(path), compression="zstd")))
    return path.open("rb")


def _first_byte(stream: io.BufferedReader) -> bytes:
    """The first byte that is neither white space nor a byte order mark; both are left unread or dropped."""
    if stream.peek(3)[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    for byte in stream.peek(4096):
        if not bytes([byte]).isspace():
            return bytes([byte])
    return b""


def _read_array(path: Path, stream: IO[bytes]) -> Iterator[RawRow | Reject]:
    data = stream.read()
    try:
        items = loads(data)
    except ValueError as error:
        if _is_json(data.lstrip().partition(b"\n")[0]):  # JSON lines, and the first one holds an array
            for n, line in enumerate(io.BytesIO(data), 1):
                if line.strip():
                    yield _parse_line(f"{path}:{n}", line)
            return
        yield Reject(f"{path}:1", "bad_json", f"the file starts with '[' and is not a JSON array: {error}")
        return
    for n, item in enumerate(items, 1):
        yield _as_row(f"{path}:{n}", item)


def _parse_line(location: str, line: bytes) -> RawRow | Reject:
    try:
        return _as_row(location, loads(line))
    except ValueError as error:
        if not line.endswith(b"\n"):
            return Reject(location, "cut_line", f"the last line is not whole JSON: {error}")
        return Reject(location, "bad_json", str(error))


def _as_row(location: str, item: object) -> RawRow | Reject:
    if isinstance(item, dict):
        return RawRow(location, item)
    return Reject(location, "not_an_object", f"expected an object, found {type(item).__name__}")


def _is_json(data: bytes) -> bool:
    try:
        loads(data)
    except ValueError:
        return False
    return True


def loads(data: bytes | str) -> Any:
    """What JSON says, fit to be encoded again. Raises ValueError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            return _clean(json.loads(data))
        except RecursionError:
            raise ValueError("nested too deeply") from None


def _clean(value: Any) -> Any:
    """`value` with each lone surrogate replaced by U+FFFD: it could not be encoded later."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
