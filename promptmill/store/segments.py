"""Segments: immutable Parquet files of answers, `segments/<partition>/<milliseconds>-<random>.parquet`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from promptmill.errors import StoreError
from promptmill.store.objects import Folder
from promptmill.types import Answer

_ids = pa.large_list(pa.int32())
SCHEMA = pa.schema(
    [
        ("prompt_hash", pa.string()),
        ("partition", pa.string()),
        ("sample", pa.int32()),
        ("turn", pa.int32()),
        ("status", pa.string()),
        ("finish_reason", pa.string()),
        ("flags", pa.list_(pa.string())),
        ("prompt_ids", _ids),
        ("output_ids", _ids),
        ("reasoning", pa.large_string()),
        ("content", pa.large_string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("reasoning_tokens", pa.int64()),
        ("resumed_tokens", pa.int64()),
        ("max_new_tokens", pa.int64()),
        ("model", pa.string()),
        ("model_revision", pa.string()),
        ("kv_dtype", pa.string()),
        ("server", pa.string()),
        ("created_at", pa.string()),
        ("error", pa.large_string()),
    ]
)
KEY_COLUMNS = ["prompt_hash", "status", "finish_reason", "max_new_tokens"]
_ROW_GROUP = 500
_READERS = 4


class Segments:
    """All segments below a folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        """Oldest first: the first segment that holds a key wins."""
        found = [n for n in self._folder.names("segments") if n.endswith(".parquet")]
        return sorted(found, key=lambda name: name.rpartition("/")[2])

    def write(self, partition: str, answers: Iterable[Answer]) -> str:
        """Publish a segment, whole and verified; returns its name. Raises StoreError."""
        rows = list(answers)
        name = f"segments/{partition}/{time.time_ns() // 1_000_000:014d}-{uuid.uuid4().hex[:8]}.parquet"
        columns = [pa.array([getattr(row, f.name) for row in rows], type=f.type) for f in SCHEMA]
        table = pa.Table.from_arrays(columns, schema=SCHEMA)
        try:
            with TemporaryDirectory(prefix="promptmill-segment-") as scratch:
                local = Path(scratch) / "segment.parquet"
                pq.write_table(table, local, compression="zstd", row_group_size=_ROW_GROUP)
                self._folder.put_file(local, name)
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"segment {self._folder.address(name)}: {error}") from error
        if self._read(name, ["prompt_hash"]).num_rows != len(rows):
            raise StoreError(f"segment {self._folder.address(name)}: rows are missing after writing it")
        return name

    def keys(self, names: Sequence[str]) -> Iterator[Any]:
        """The KEY_COLUMNS of all rows in order, as Arrow tables of some segments each."""
        return map(pa.concat_tables, self._read_all(names, KEY_COLUMNS))

    def hashes(self, names: Sequence[str]) -> Iterator[Any]:
        """The prompt hashes of each segment, as an Arrow array."""
        for tables in self._read_all(names, ["prompt_hash"]):
            yield from (table.column("prompt_hash").combine_chunks() for table in tables)

    def flagged(self, flag: str, names: Iterable[str]) -> Iterator[str]:
        """Hashes of the answers with this flag or of this status."""
        for name in names:
            table = self._read(name, ["prompt_hash", "status", "flags"])
            for row in table.to_pylist():
                if flag == row["status"] or flag in row["flags"]:
                    yield row["prompt_hash"]

    def flags(self, names: Iterable[str]) -> set[str]:
        """Every flag that an answer has."""
        found: set[str] = set()
        for name in names:
            found.update(
                pc.unique(self._read(name, ["flags"]).column("flags").combine_chunks().flatten()).to_pylist()
            )
        return found

    def everything(self, names: Iterable[str]) -> Iterator[Answer]:
        """All answers, segment by segment."""
        for name in names:
            for batch in self._batches(name):
                yield from (Answer(**row) for row in batch.to_pylist())

    def lookup(self, hashes: Set[str], names: Iterable[str]) -> Iterator[Answer]:
        """The answers to `hashes`, segment by segment in the order of `names`."""
        wanted = pa.array(sorted(hashes), type=pa.string())
        for name in names:
            for batch in self._batches(name):
                kept = batch.filter(pc.is_in(batch.column("prompt_hash"), value_set=wanted))
                yield from (Answer(**row) for row in kept.to_pylist())

    def _read(self, name: str, columns: list[str]) -> Any:
        with self._opened(name, columns) as file:
            # Each of Arrow's own threads would keep some megabytes for what it decodes.
            return file.read(columns=columns, use_threads=False)

    def _read_all(self, names: Sequence[str], columns: list[str]) -> Iterator[list[Any]]:
        """These columns as a table a segment, in order, some segments at a time."""
        with ThreadPoolExecutor(_READERS) as readers:  # a run of days leaves thousands, each a file to open
            for start in range(0, len(names), _READERS):
                some = names[start : start + _READERS]
                yield list(readers.map(lambda name: self._read(name, columns), some))

    def _batches(self, name: str) -> Iterator[Any]:
        with self._opened(name, SCHEMA.names) as file:
            yield from file.iter_batches(batch_size=_ROW_GROUP, columns=SCHEMA.names)

    @contextmanager
    def _opened(self, name: str, columns: list[str]) -> Iterator[Any]:
        """The segment as a ParquetFile. What reading it raises becomes a StoreError that names it."""
        try:
            # Not pq.read_table: it imports pyarrow.dataset and pandas, two seconds for nothing.
            with self._folder.open(name) as stream, pq.ParquetFile(stream) as file:
                missing = set(columns) - set(file.schema_arrow.names)
                if missing:
                    raise self._broken(name, f"it has no column {min(missing)}")
                yield file
        # pyarrow reports a damaged page as a plain OSError, a damaged footer as an ArrowException.
        except (OSError, pa.ArrowException) as error:
            raise self._broken(name, error) from error

    def _broken(self, name: str, error: object) -> StoreError:
        why = " ".join(str(error).split()).rstrip(".")  # Arrow's messages have several lines
        said = f"segment {self._folder.address(name)} cannot be read: {why}."
        if isinstance(error, OSError) and error.errno:  # the disk or network, not the file
            return StoreError(said)
        return StoreError(f"{said} Move it away to have its prompts answered again.")
