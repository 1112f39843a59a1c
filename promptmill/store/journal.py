"""The journal: one SQLite file in which an answer is durable before its slot in the window is freed.

One thread writes, and commits everything that is waiting in one transaction (group commit). Readers open
connections of their own, from any process, at any moment.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import queue
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from promptmill.errors import LockHeld, StoreError
from promptmill.types import Answer

_TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    prompt_hash TEXT PRIMARY KEY, partition TEXT NOT NULL, status TEXT NOT NULL,
    finish_reason TEXT NOT NULL, max_new_tokens INTEGER NOT NULL, body BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_by_partition ON answers (partition, prompt_hash);
CREATE TABLE IF NOT EXISTS partials (
    prompt_hash TEXT NOT NULL, partition TEXT NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS partials_by_hash ON partials (prompt_hash);
CREATE TABLE IF NOT EXISTS memory (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
# A failure never takes the place of an answer, be it one that was cut.
_UPSERT = """
INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (prompt_hash) DO UPDATE SET
    partition = excluded.partition, status = excluded.status, finish_reason = excluded.finish_reason,
    max_new_tokens = excluded.max_new_tokens, body = excluded.body
    WHERE excluded.status <> 'failed' OR answers.status = 'failed'
"""
_GROUP = 500
_PAUSE_S = 0.1  # a commit costs as much as ten answers; a request that took a minute can wait as long
_LOOK_S = 1.0


class Piece(NamedTuple):
    """Some output ids of an unfinished answer, from position `start` on; what stood there before is void."""

    prompt_hash: str
    partition: str
    start: int
    ids: Sequence[int]


Waiter = Future[None] | asyncio.Future[None]


class Job(NamedTuple):
    write: Callable[[sqlite3.Connection], None]
    waiter: Waiter
    written: Callable[[], None] | None = None
    """Called in the journal's thread when it is durable, before the waiter is told."""


class JournalLock:
    """Held by the one process that writes a journal; the kernel frees it when that process is gone."""

    def __init__(self, journal: Path) -> None:
        self.path = journal.with_name(journal.name + ".lock")

    def acquire(self, note: str) -> None:
        """Raises LockHeld with the holder's own note, StoreError where the file cannot be made."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror}") from error
        deadline = time.monotonic() + _LOOK_S
        while not _try_lock(self._handle, fcntl.LOCK_EX):
            # No holder: somebody looks at it just now, which takes a moment, or has it and did not sign yet.
            holder = self.holder()
            if holder or time.monotonic() > deadline:
                os.close(self._handle)
                raise LockHeld(f"another run holds {self.path}: {holder or 'unknown'}.")
            time.sleep(0.01)
        os.ftruncate(self._handle, 0)
        os.write(self._handle, json.dumps({"pid": os.getpid(), "note": note}).encode())

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)

    def holder(self) -> str:
        """Who holds it now, in words; empty where nobody does."""
        with suppress(OSError, ValueError), self.path.open("rb") as file:
            if not _try_lock(file.fileno(), fcntl.LOCK_SH):
                owner = json.loads(file.read())
                return f"pid {owner['pid']}, {owner['note']}"
        return ""


class Journal:
    """The writer's side. Owns one thread from `start` to `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)

    def start(self) -> None:
        """Raises StoreError where the file is no journal, is torn, or cannot be written."""
        _check_begins(self.path)
        try:
            with ExitStack() as undo:
                connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
                undo.callback(connection.close)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.executescript(_TABLES)
                _check_whole(connection, self.path)
                undo.pop_all()
        except sqlite3.Error as error:
            raise _failure(self.path, error) from error
        self._connection = connection
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after everything that was handed over is written."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
        self._connection.close()

    def put(self, answer: Answer) -> Future[None]:
        """Resolves when `answer` is durable; fails with StoreError."""
        future: Future[None] = Future()
        self.put_for(future, answer)
        return future

    def put_for(self, waiter: Waiter, answer: Answer, written: Callable[[], None] | None = None) -> None:
        """The same for a waiter of the caller's; those of one loop are told of a commit in one call."""
        row = (
            answer.prompt_hash,
            answer.partition,
            answer.status,
            answer.finish_reason,
            answer.max_new_tokens,
            orjson.dumps(answer),
        )

        def write(connection: sqlite3.Connection) -> None:
            _execute(connection, _UPSERT, row)
            _execute(connection, "DELETE FROM partials WHERE prompt_hash = ?", row[:1])

        self._jobs.put(Job(write, waiter, written))

    def put_partials(self, pieces: Sequence[Piece]) -> Future[None]:
        """Resolves when the pieces of unfinished answers are durable; fails with StoreError."""
        sql = "INSERT INTO partials VALUES (?, ?, ?, ?)"
        rows = [(p.prompt_hash, p.partition, p.start, array("I", p.ids).tobytes()) for p in pieces]
        return self._submit(lambda connection: _execute_many(connection, sql, rows))

    def forget_partials(self, partition: str) -> Future[None]:
        """Remove what nobody will go on from any more."""
        sql = "DELETE FROM partials WHERE partition = ?"
        return self._submit(lambda connection: _execute(connection, sql, (partition,)))

    def forget(self, answers: list[Answer]) -> None:
        """Remove answers that lie in a verified segment; returns when that is durable.

        One that was replaced meanwhile (asked again with a higher cap) stays.
        """
        rows = [(a.prompt_hash, a.status, a.max_new_tokens) for a in answers]
        sql = "DELETE FROM answers WHERE prompt_hash = ? AND status = ? AND max_new_tokens = ?"
        self._submit(lambda connection: _execute_many(connection, sql, rows)).result()

    def withdraw(self, prompt_hashes: Sequence[str], written: Callable[[], None]) -> Future[None]:
        """Remove answers that turned out to be none; `written` is called when that is durable."""
        sql = "DELETE FROM answers WHERE prompt_hash = ?"
        future: Future[None] = Future()
        rows = [(h,) for h in prompt_hashes]
        self._jobs.put(Job(lambda connection: _execute_many(connection, sql, rows), future, written))
        return future

    def remember(self, key: str, value: Any) -> None:
        """Keep a small fact for later runs."""
        row = (key, json.dumps(value))
        self._submit(
            lambda connection: _execute(connection, "INSERT OR REPLACE INTO memory VALUES (?, ?)", row)
        ).result()

    def _submit(self, action: Callable[[sqlite3.Connection], None]) -> Future[None]:
        future: Future[None] = Future()
        self._jobs.put(Job(action, future))
        return future

    def _write(self) -> None:
        open_, next_s = True, 0.0
        while open_:
            jobs = [self._jobs.get()]
            time.sleep(max(0.0, next_s - time.monotonic()))
            with suppress(queue.Empty):
                while len(jobs) < _GROUP:
                    jobs.append(self._jobs.get_nowait())
            open_ = None not in jobs
            self._commit([job for job in jobs if job is not None])
            next_s = time.monotonic() + _PAUSE_S

    def _commit(self, jobs: list[Job]) -> None:
        for job in jobs:
            if isinstance(job.waiter, Future):
                job.waiter.set_running_or_notify_cancel()  # it is written from here on, whoever stops waiting
        failure = None
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                job.write(self._connection)
            self._connection.execute("COMMIT")
            for job in jobs:
                if job.written is not None:
                    job.written()
        except Exception as error:  # noqa: BLE001  whatever it is, nobody may wait for this thread for ever
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            failure = _failure(self.path, error)
        _tell([job.waiter for job in jobs], failure)


def _tell(waiters: list[Waiter], failure: StoreError | None) -> None:
    """Waking a loop up from another thread costs as much as a tenth of an answer: once for all of its own."""
    by_loop: dict[asyncio.AbstractEventLoop | None, list[Waiter]] = {}
    for waiter in waiters:
        loop = waiter.get_loop() if isinstance(waiter, asyncio.Future) else None
        by_loop.setdefault(loop, []).append(waiter)
    for loop, some in by_loop.items():
        if loop is None:
            _resolve(some, failure)
        else:
            with suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(_resolve, some, failure)


def _resolve(waiters: list[Waiter], failure: StoreError | None) -> None:
    for waiter in waiters:
        if waiter.done():  # cancelled
            continue
        if failure is not None:
            waiter.set_exception(failure)
        else:
            waiter.set_result(None)


class JournalReader:
    """Reads a journal that may be written meanwhile, by this process or another. A missing one is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keys(self) -> Iterator[tuple[str, str, str, int]]:
        """(prompt_hash, status, finish_reason, max_new_tokens) of every answer."""
        yield from self._query("SELECT prompt_hash, status, finish_reason, max_new_tokens FROM answers")

    def answers(self, partition: str) -> Iterator[Answer]:
        """The answers of a partition, in the order of their hashes, as a stream."""
        sql = "SELECT body FROM answers WHERE partition = ? ORDER BY prompt_hash"
        rows = self._query(sql, (partition,))
        yield from (self._answer(body) for (body,) in rows)

    def lookup(self, hashes: list[str]) -> Iterator[Answer]:
        for start in range(0, len(hashes), 500):
            some = hashes[start : start + 500]
            marks = ",".join("?" * len(some))
            rows = self._query(f"SELECT body FROM answers WHERE prompt_hash IN ({marks})", tuple(some))
            yield from (self._answer(body) for (body,) in rows)

    def partials(self, partition: str) -> dict[str, list[int]]:
        """The output ids of unfinished answers; of two pieces for one place, the later one holds."""
        sql = "SELECT prompt_hash, start, ids FROM partials WHERE partition = ? ORDER BY rowid"
        joined: dict[str, array[int]] = {}
        for prompt_hash, start, ids in self._query(sql, (partition,)):
            answer = joined.setdefault(prompt_hash, array("I"))
            if start <= len(answer):  # else a piece is missing before it
                answer[start:] = array("I", ids)
        return {prompt_hash: list(ids) for prompt_hash, ids in joined.items() if ids}

    def partitions(self) -> dict[str, int]:
        """Partitions with answers, and the bytes that each holds."""
        return dict(self._query("SELECT partition, SUM(LENGTH(body)) FROM answers GROUP BY partition"))

    def recall(self, key: str) -> Any:
        """What was remembered under `key`, or None."""
        rows = list(self._query("SELECT value FROM memory WHERE key = ?", (key,)))
        return json.loads(rows[0][0]) if rows else None

    def _answer(self, body: bytes) -> Answer:
        try:
            return Answer(**orjson.loads(body))
        except (ValueError, TypeError) as error:
            raise _torn(self.path, f"an answer cannot be read ({error})") from error

    def _query(self, sql: str, arguments: tuple[Any, ...] = ()) -> Iterator[Any]:
        _check_begins(self.path)
        if not self.path.is_file():
            return
        try:
            with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=30)) as connection:
                yield from connection.execute(sql, arguments)
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):  # a journal that was just created
                raise _failure(self.path, error) from error
        except sqlite3.Error as error:
            raise _failure(self.path, error) from error


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_begins(path: Path) -> None:
    """Raises StoreError where the log is there alone: SQLite would delete it, and begin an empty file."""
    with suppress(FileNotFoundError):
        has_log = path.with_name(path.name + "-wal").stat().st_size
        if has_log and not (path.exists() and path.stat().st_size):
            raise _torn(path, "the file is empty, and its log is not")


def _check_whole(connection: sqlite3.Connection, path: Path) -> None:
    """Raises StoreError where pages are missing. It reads the file, which sealing keeps small.

    SQLite does not miss the last page of a value; an answer's last byte tells.
    """
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise _torn(path, str(found).replace("\n", " "))
    cut = connection.execute("SELECT prompt_hash FROM answers WHERE substr(body, -1) <> x'7D' LIMIT 1")
    if row := cut.fetchone():
        raise _torn(path, f"answer {row[0][:12]} lacks its end")


def _failure(path: Path, error: Exception) -> StoreError:
    words = str(error)
    if "malformed" in words or "not a database" in words:
        return _torn(path, words)
    return StoreError(f"journal {path}: {words}")


def _torn(path: Path, what: str) -> StoreError:
    return StoreError(
        f"journal {path} is damaged: {what}. Move {path} away, with the files -wal and -shm beside it, and "
        "run again: what lies in segments is kept, and the answers that were in the journal alone are asked "
        f"again. `sqlite3 {path} .recover` may save some of them."
    )


def _execute(connection: sqlite3.Connection, sql: str, row: tuple[Any, ...]) -> None:
    connection.execute(sql, row)


def _execute_many(connection: sqlite3.Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    connection.executemany(sql, rows)
