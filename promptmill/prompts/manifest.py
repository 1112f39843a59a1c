"""Prepares a partition: reads, renders, counts and hashes every prompt before any GPU time is spent.

The prompts go into a Parquet file beside the journal, so that an unchanged source is neither read nor
rendered again; what is passed around is the small `Manifest`.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError, StoreError
from promptmill.files import written_whole
from promptmill.memory import rare_collections
from promptmill.model import Model
from promptmill.prompts import formats, json_text, sources
from promptmill.prompts.hashing import SCHEMA_VERSION, Digests, RunningDigest, digests
from promptmill.prompts.readers import read_rows
from promptmill.prompts.rows import RowReader
from promptmill.settings import PartitionSettings, Profile
from promptmill.types import Manifest, PromptRow, Reject

FILES_VERSION = 2
"""Raised when what lies in a manifest's files changes: they are made anew, and prompt hashes stay."""

_BATCH = 1000
_BATCH_TOKENS = 500_000
"""Before they are written; those of a tokenizer that is asked row by row take 36 bytes each."""
_AS_WRITTEN: dict[str, Any] = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
"""Hardly a value stands there twice, and the file is read as a whole."""
_AT_A_TIME = 100
_ROWS_OF_KEYS = 10_000
_EXAMPLES = 3
_KEY_COLUMNS = ["prompt_hashes", "max_new_tokens"]
_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("id", pa.string()),
        ("location", pa.string()),
        ("turns", pa.large_string()),
        ("tools", pa.large_string()),
        ("input_ids", pa.large_list(pa.int32())),
        ("prompt_hashes", pa.list_(pa.list_(pa.string()))),
        ("max_new_tokens", pa.int32()),
    ]
)


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that preparing a partition needs, so that one call does it."""

    profile: Profile
    partition: PartitionSettings
    model: Model
    renderer: ChatRenderer
    folder: Path
    limit: int | None
    context_tokens: int | None
    """Prompt and answer together may not be longer; None where only the server knows."""

    def identity(self) -> dict[str, Any]:
        """What a prompt hash covers besides the prompt itself, by the name of the setting."""
        sampling = self.profile.sampling_for(self.partition).model_dump(mode="json", exclude={"samples"})
        return {
            "model": self.model.name,
            "model_revision": self.model.revision,
            "chat": self.renderer.fingerprint(),
            **{f"sampling.{name}": value for name, value in sampling.items() if value is not None},
            **({"server.api": "chat"} if self.profile.server.api == "chat" else {}),
        }

    def key(self) -> str:
        """A hash of what the manifest depends on. Raises ConfigError where there is no source."""
        files = sources.list_files(self.partition.source)
        parts = {
            "schema": [SCHEMA_VERSION, FILES_VERSION],
            "files": sources.fingerprint(files),
            "partition": self.partition.model_dump(mode="json", exclude={"weight"}),
            "model": [self.model.name, self.model.revision],
            "renderer": self.renderer.fingerprint(),
            "rules": [self.profile.chat.ignored_tools, self.profile.chat.tool_arguments],
            "api": self.profile.server.api,
            "sampling": self.profile.sampling_for(self.partition).model_dump(mode="json"),
            "max_new_tokens": self.profile.max_new_tokens(self.partition),
            "context_tokens": self.context_tokens,
            "limit": self.limit,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def paths(self) -> tuple[Path, Path]:
        """Where the prompts and the rejects of this very preparation lie, or will."""
        stem = f"{self.partition.name}-{self.key()}"
        return self.folder / f"{stem}.parquet", self.folder / f"{stem}.rejects.jsonl"


def prepare(preparation: Preparation) -> Manifest:
    """Read and render the partition's source.

    Raises ConfigError where the source cannot be read at all, or what comes of it cannot be kept.
    """
    part = preparation.partition
    key = preparation.key()
    path, rejects_path = preparation.paths()
    cap = preparation.profile.max_new_tokens(part)
    summary = _Summary(cap)
    try:
        with (
            rare_collections(),
            written_whole(path) as prompts_file,
            written_whole(rejects_path) as rejects_file,
        ):
            chosen = _write(preparation, summary, prompts_file, rejects_file)
    except OSError as error:  # what is read has errors of its own
        raise ConfigError(
            f"{path.parent}: prepared prompts cannot be kept there: {error.strerror or error}; "
            "free some space, or set store.url or store.journal to where there is room."
        ) from None
    return Manifest(
        partition=part.name,
        key=key,
        path=str(path),
        rejects_path=str(rejects_path),
        format=chosen.format,
        column=chosen.column,
        rows=summary.prompts + summary.rejected.total(),
        prompts=summary.prompts,
        rejected=dict(summary.rejected.most_common()),
        examples=summary.examples,
        notes=dict(summary.notes.most_common()),
        prompt_tokens=summary.tokens,
        longest_prompt=summary.longest,
        longest_request=summary.longest_request,
        digest=summary.hashes.hexdigest(),
        max_new_tokens=cap,
        identity=preparation.identity(),
    )


def make_current(manifest: Manifest, folder: Path) -> None:
    """Make `manifest` the one that the partition's accounting follows; files of earlier ones go."""
    with written_whole(folder / f"{manifest.partition}.json") as file:
        file.write(json.dumps(manifest.to_json(), indent=1).encode())
    kept = {Path(manifest.path).name, Path(manifest.rejects_path).name}
    pattern = re.compile(re.escape(manifest.partition) + r"-[0-9a-f]{32}\.(parquet|rejects\.jsonl)")
    for old in folder.iterdir():
        if pattern.fullmatch(old.name) and old.name not in kept:
            old.unlink(missing_ok=True)


def load_current(folder: Path, partition: str) -> Manifest | None:
    """The manifest that the last run or plan made, if its files are still there."""
    try:
        manifest = Manifest.from_json(json.loads((folder / f"{partition}.json").read_text("utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    return manifest if are_whole(Path(manifest.path), Path(manifest.rejects_path)) else None


def are_whole(prompts: Path, rejects: Path) -> bool:
    """Whether the files of a manifest are there, its prompts to the end: a disk may lose what was written."""
    try:
        pq.read_metadata(prompts)
    except (OSError, pa.ArrowException):
        return False
    return rejects.is_file()


@dataclass(frozen=True, slots=True)
class Keys:
    """The prompt hashes of some rows in a row, as arrays: what is counted is counted without a loop."""

    digests: Digests
    """Of every turn of every sample of every row."""
    chains: npt.NDArray[np.int64]
    """Where each sample's turns start among the digests."""
    rows: npt.NDArray[np.int64]
    """Where each row's samples start among the chains."""
    caps: dict[int, int] = field(default_factory=dict)
    """max_new_tokens of the few rows that have less than the partition's, by place."""

    def of_row(self, row: int) -> slice:
        """Where the digests of a row are."""
        first, after = self.rows[row], self.rows[row + 1] if row + 1 < len(self.rows) else len(self.chains)
        end = self.chains[after] if after < len(self.chains) else len(self.digests)
        return slice(int(self.chains[first]), int(end))


Wanted = Callable[[Keys], npt.NDArray[np.bool_]]
"""Tells, of each row, whether it is wanted."""


def read_prompts(manifest: Manifest, wanted: Wanted | None = None) -> Iterator[PromptRow]:
    """The prompts in input order, as a stream.

    With `wanted`, those alone; of what holds none of them nothing but the hashes is read.
    """
    with _opened(manifest.path) as file:
        for group in range(file.num_row_groups):
            chosen: Any = None
            if wanted is not None:
                keys = file.read_row_group(group, columns=_KEY_COLUMNS).combine_chunks()
                chosen = _where(wanted(_keys(keys.to_batches()[0]))) if len(keys) else []
                if not len(chosen):
                    continue
            table = file.read_row_group(group)
            if chosen is not None:
                table = table.take(chosen)
            # Ids become Python's integers, ten times as large: not for a thousand long prompts at a time.
            for batch in table.to_batches(max_chunksize=_AT_A_TIME):
                for row in batch.to_pylist():
                    yield PromptRow(
                        row=row["row"],
                        id=row["id"],
                        location=row["location"],
                        turns=json_text.loads(row["turns"]),
                        tools=json_text.loads(row["tools"]) if row["tools"] else None,
                        input_ids=row["input_ids"],
                        prompt_hashes=row["prompt_hashes"],
                        max_new_tokens=row["max_new_tokens"],
                    )


def read_keys(manifest: Manifest, wanted: Wanted | None = None) -> Iterator[list[list[str]]]:
    """The prompt hashes of every prompt in input order, by sample and turn; of the `wanted` ones alone."""
    for batch in _key_batches(manifest):
        hashes = batch.column("prompt_hashes")
        if wanted is not None:
            hashes = hashes.take(_where(wanted(_keys(batch))))
        yield from hashes.to_pylist()


def read_key_arrays(manifest: Manifest) -> Iterator[Keys]:
    """The same of all prompts as arrays, some thousand rows at a time."""
    return map(_keys, _key_batches(manifest))


def _key_batches(manifest: Manifest) -> Iterator[Any]:
    """What of the file says how far it is, in pieces that are not empty."""
    with _opened(manifest.path) as file:
        for batch in file.iter_batches(_ROWS_OF_KEYS, columns=_KEY_COLUMNS, use_threads=False):
            if len(batch):
                yield batch


def _keys(batch: Any) -> Keys:
    rows, caps = batch.column("prompt_hashes"), batch.column("max_new_tokens")
    samples = rows.flatten()
    lowered = {}
    if caps.null_count < len(caps):
        lowered = {place: cap for place, cap in enumerate(caps.to_pylist()) if cap is not None}
    return Keys(digests(samples.flatten()), _starts(samples), _starts(rows), lowered)


def _starts(lists: Any) -> npt.NDArray[np.int64]:
    """Where each list starts among the values of all; from the buffer, as Arrow's own way imports pandas."""
    offsets: npt.NDArray[np.int32] = np.frombuffer(lists.buffers()[1], np.int32)[lists.offset :]
    starts: npt.NDArray[np.int64] = (offsets[: len(lists)] - offsets[0]).astype(np.int64)
    return starts


def _where(chosen: npt.NDArray[np.bool_]) -> Any:
    """The places that are true, as Arrow takes them."""
    places = np.flatnonzero(chosen).astype(np.int64)
    return pa.Array.from_buffers(pa.int64(), len(places), [None, pa.py_buffer(places)])


def read_rejects(manifest: Manifest) -> Iterator[Reject]:
    """In input order. Raises StoreError where the file is damaged."""
    try:
        with Path(manifest.rejects_path).open("rb") as file:
            for line in file:
                yield Reject(**orjson.loads(line))
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(manifest.rejects_path, error) from None


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    """A manifest's prompts. Raises StoreError where they are damaged."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> StoreError:
    first = next(iter(str(error).splitlines()), type(error).__name__)
    return StoreError(f"{path} is damaged: {first}. Delete it: promptmill plan or run makes it anew.")


class _Summary:
    def __init__(self, cap: int) -> None:
        self._cap = cap
        self.prompts = 0
        self.tokens = 0
        self.longest = 0
        self.longest_request = 0
        self.hashes = RunningDigest()
        self.rejected: Counter[str] = Counter()
        self.examples: list[str] = []
        self.notes: Counter[str] = Counter()

    def add(self, row: PromptRow, notes: set[str]) -> None:
        self.prompts += 1
        self.notes.update(notes)
        self.tokens += len(row.input_ids)
        self.longest = max(self.longest, len(row.input_ids))
        request = len(row.input_ids) + (row.max_new_tokens or self._cap)
        self.longest_request = max(self.longest_request, request)
        for chain in row.prompt_hashes:
            self.hashes.update(chain)

    def reject(self, reject: Reject) -> None:
        self.rejected[reject.reason] += 1
        if self.rejected[reject.reason] <= _EXAMPLES:
            self.examples.append(f"{reject.location}: {reject.reason}: {reject.detail}"[:400])


def _write(
    preparation: Preparation, summary: _Summary, prompts_file: Any, rejects_file: Any
) -> formats.Choice:
    """Stream the source into the two files; returns the format that was used."""
    part = preparation.partition
    rows = islice(read_rows(sources.list_files(part.source)), preparation.limit)
    reader = RowReader(preparation)
    batch: list[PromptRow] = []
    tokens = 0
    with (
        pq.ParquetWriter(prompts_file, _SCHEMA, **_AS_WRITTEN) as writer,
        ThreadPoolExecutor(1, "write") as pool,  # compression needs no GIL
    ):
        written: Future[None] = pool.submit(writer.write_batch, _to_arrow([]))
        for result in reader.read(rows):
            if isinstance(result, Reject):
                summary.reject(result)
                rejects_file.write(_line(result))
                continue
            summary.add(*result)
            batch.append(result[0])
            tokens += len(result[0].input_ids)
            if len(batch) == _BATCH or tokens >= _BATCH_TOKENS:
                written.result()
                written = pool.submit(writer.write_batch, _to_arrow(batch))
                batch, tokens = [], 0
        written.result()
        writer.write_batch(_to_arrow(batch))
    return reader.chosen


def _line(reject: Reject) -> bytes:
    try:
        return orjson.dumps(reject, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a detail that quotes what cannot be encoded
        detail = reject.detail.encode("utf-8", "replace").decode()
        return orjson.dumps(replace(reject, detail=detail), option=orjson.OPT_APPEND_NEWLINE)


def _to_arrow(rows: list[PromptRow]) -> pa.RecordBatch:
    columns = {
        "row": [r.row for r in rows],
        "id": [r.id for r in rows],
        "location": [r.location for r in rows],
        "turns": [json_text.dumps(r.turns) for r in rows],
        "tools": [json_text.dumps(r.tools) if r.tools else None for r in rows],
        "prompt_hashes": [r.prompt_hashes for r in rows],
        "max_new_tokens": [r.max_new_tokens for r in rows],
    }
    arrays = {name: pa.array(values, type=_SCHEMA.field(name).type) for name, values in columns.items()}
    arrays["input_ids"] = _lists([r.input_ids for r in rows])
    return pa.RecordBatch.from_arrays([arrays[name] for name in _SCHEMA.names], schema=_SCHEMA)


def _lists(rows: list[Sequence[int]]) -> Any:
    """Lists of ids as Arrow's, most of them without one Python integer."""
    ends = np.cumsum([0, *map(len, rows)])
    packed = b"".join((ids if isinstance(ids, array) else array("I", ids)).tobytes() for ids in rows)
    values = pa.Array.from_buffers(pa.int32(), int(ends[-1]), [None, pa.py_buffer(packed)])
    offsets = pa.Array.from_buffers(pa.int64(), len(ends), [None, pa.py_buffer(ends.astype(np.int64))])
    return pa.LargeListArray.from_arrays(offsets, values)
