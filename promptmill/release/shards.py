"""The files of one partition in one view, written row by row."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_A_BATCH = 256
_ROW_GROUP_BYTES = 32_000_000


class Shards:
    """`<partition>-00000-of-0000N.parquet` below a folder, each of about `limit` bytes before compression."""

    def __init__(self, folder: Path, partition: str, schema: pa.Schema, limit: int) -> None:
        self._folder = folder
        self._partition = partition
        self._schema = schema
        self._limit = limit
        self._done: list[tuple[Path, int]] = []
        self._batch: list[dict[str, Any]] = []
        self._writer: Any = None
        self._bytes = self._rows = 0
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:  # something broke on the way
            self._writer.close()

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        self._batch.extend(rows)
        if len(self._batch) >= _ROWS_A_BATCH:
            self._write_batch()

    def finish(self, always: bool) -> list[tuple[Path, int]]:
        """The shards and their rows; none for a partition without rows, or one empty one if `always`."""
        if self._batch:
            self._write_batch()
        if always and self._writer is None and not self._done:
            self._begin_shard()
        if self._writer is not None:
            self._end_shard()
        named = []
        for i, (path, n) in enumerate(self._done):
            name = f"{self._partition}-{i:05d}-of-{len(self._done):05d}.parquet"
            named.append((path.rename(path.with_name(name)), n))
        return named

    def _write_batch(self) -> None:
        if self._writer is None:
            self._begin_shard()
        table = pa.Table.from_pylist(self._batch, schema=self._schema)
        self._batch = []
        self._writer.write_table(table, row_group_size=_row_group(table))
        self._bytes += table.nbytes
        self._rows += table.num_rows
        if self._bytes >= self._limit:
            self._end_shard()

    def _begin_shard(self) -> None:
        self._path = self._folder / f"{self._partition}-{len(self._done):05d}.parquet"
        self._writer = pq.ParquetWriter(self._path, self._schema, compression="zstd")
        self._bytes = self._rows = 0

    def _end_shard(self) -> None:
        writer, self._writer = self._writer, None
        writer.close()
        self._done.append((self._path, self._rows))


def _row_group(table: pa.Table) -> int:
    """Rows a row group, by bytes: a reader holds one group at a time."""
    mean = max(1, int(table.nbytes) // max(1, int(table.num_rows)))
    return max(1, _ROW_GROUP_BYTES // mean)
