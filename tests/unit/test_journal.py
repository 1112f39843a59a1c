"""The journal: durable before resolved, readable meanwhile, one writer by flock."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from promptmill.errors import LockHeld, StoreError
from promptmill.store.journal import Journal, JournalLock, JournalReader, Piece
from promptmill.types import Answer
from tests.helpers_store import answer, cut, end, sha, start_python

WAIT_S = 60

Connected = Callable[[sqlite3.Connection], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    started = Journal(path)
    started.start()
    yield started
    started.close()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes alone is committed alone, and waits for no others."""
    monkeypatch.setattr("promptmill.store.journal._PAUSE_S", 0.0)


def on_connect(monkeypatch: pytest.MonkeyPatch, action: Connected) -> None:
    """Do something to every SQLite connection that is made from here on."""
    connect = sqlite3.connect

    def connected(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        action(connection)
        return connection

    monkeypatch.setattr(sqlite3, "connect", connected)


def stored(path: Path, partition: str = "P") -> dict[str, Answer]:
    """What a connection of its own finds."""
    return {a.prompt_hash: a for a in JournalReader(path).answers(partition)}


def test_partials_are_joined_in_order_until_the_answer_is_there(journal: Journal, path: Path) -> None:
    reader = JournalReader(path)
    journal.put_partials([Piece("a", "P", 0, [1, 2]), Piece("b", "P", 0, [7])]).result(WAIT_S)
    journal.put_partials([Piece("a", "P", 2, [3]), Piece("c", "Q", 0, [9])]).result(WAIT_S)
    assert reader.partials("P") == {"a": [1, 2, 3], "b": [7]}
    journal.put(answer("a")).result(WAIT_S)
    assert reader.partials("P") == {"b": [7]}
    journal.forget_partials("P").result(WAIT_S)
    assert (reader.partials("P"), reader.partials("Q")) == ({}, {"c": [9]})


def test_later_piece_for_a_place_holds_and_one_behind_a_gap_does_not(journal: Journal, path: Path) -> None:
    pieces = [Piece("a", "P", 0, [1, 2, 3]), Piece("a", "P", 1, [8]), Piece("b", "P", 2, [5])]
    journal.put_partials([*pieces, Piece("c", "P", 0, [4]), Piece("c", "P", 0, [])]).result(WAIT_S)
    assert JournalReader(path).partials("P") == {"a": [1, 8]}


def test_put_is_read_whole_by_another_connection_once_it_resolves(journal: Journal, path: Path) -> None:
    given = answer(sha("a"), flags=["repetition"], content="naïve 🦊\n", error="none")
    journal.put(given).result(WAIT_S)
    assert stored(path) == {given.prompt_hash: given}
    assert list(JournalReader(path).keys()) == [(given.prompt_hash, "answered", "stop", 64)]
    assert list(JournalReader(path).lookup([sha("b"), given.prompt_hash])) == [given]


def test_put_resolves_only_after_the_commit(journal: Journal, path: Path) -> None:
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    futures = [journal.put(answer(sha(str(i)))) for i in range(40)]
    assert not any(future.done() for future in futures)
    assert stored(path) == {}
    blocker.execute("ROLLBACK")
    blocker.close()
    for future in futures:
        future.result(WAIT_S)
    assert len(stored(path)) == 40


def test_put_commits_everything_that_waits_in_one_transaction(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[str] = []
    on_connect(monkeypatch, lambda connection: connection.set_trace_callback(statements.append))
    journal = Journal(path)
    journal.start()
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    statements.clear()
    futures = [journal.put(answer(sha(str(i)))) for i in range(200)]
    blocker.execute("ROLLBACK")
    blocker.close()
    for future in futures:
        future.result(WAIT_S)
    journal.close()
    assert statements.count("COMMIT") < 10, "200 answers waited together"


def test_puts_a_moment_apart_share_commits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    on_connect(monkeypatch, lambda connection: connection.set_trace_callback(statements.append))
    monkeypatch.setattr("promptmill.store.journal._PAUSE_S", 0.5)
    journal = Journal(path)
    journal.start()
    journal.put(answer(sha("first"))).result(WAIT_S)  # it waited for nothing
    futures = []
    for i in range(20):
        futures.append(journal.put(answer(sha(str(i)))))
        time.sleep(0.001)
    for future in futures:
        future.result(WAIT_S)
    journal.close()
    assert statements.count("COMMIT") < 10


def test_put_survives_sigkill_of_the_writer(path: Path) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from tests.helpers_store import answer, sha
from promptmill.store.journal import Journal
journal = Journal(Path(sys.argv[1])); journal.start()
for i in range(10**9):
    journal.put(answer(sha(str(i)))).result()
    print(i, flush=True)
"""
    writer = start_python(code, str(path))
    try:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(20)]
    finally:
        end(writer)
    assert {sha(str(i)) for i in seen} <= stored(path).keys()


def test_put_replaces_the_answer_to_the_same_prompt(journal: Journal, path: Path) -> None:
    journal.put(cut(sha("a"), 64)).result(WAIT_S)
    journal.put(answer(sha("a"), max_new_tokens=128)).result(WAIT_S)
    assert [a.max_new_tokens for a in stored(path).values()] == [128]


def test_put_whose_waiter_gave_up_is_written_and_the_next_one_too(journal: Journal, path: Path) -> None:
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    futures = [journal.put(answer(sha(str(i)))) for i in range(3)]
    futures[1].cancel()
    blocker.execute("ROLLBACK")
    blocker.close()
    futures[2].result(WAIT_S)
    assert len(stored(path)) == 3


def test_put_on_a_full_disk_fails_with_store_error_and_keeps_what_was_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 24")

    on_connect(monkeypatch, small)
    journal = Journal(path)
    journal.start()
    kept = answer(sha("kept"))
    journal.put(kept).result(WAIT_S)
    with pytest.raises(StoreError, match=r"journal\.sqlite.*full"):
        journal.put(answer(sha("large"), content="x" * 500_000)).result(WAIT_S)
    journal.put(answer(sha("small"))).result(WAIT_S)
    journal.close()
    assert stored(path).keys() == {sha("kept"), sha("small")}


def test_start_on_a_file_that_is_no_journal_is_a_store_error_and_leaves_it_alone(path: Path) -> None:
    path.write_bytes(b"something else, of somebody else\n" * 100)
    with pytest.raises(StoreError, match=r"journal\.sqlite"):
        Journal(path).start()
    assert path.read_bytes().startswith(b"something else")
    with pytest.raises(StoreError, match=r"journal\.sqlite"):
        list(JournalReader(path).keys())


def test_start_without_a_folder_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing"):
        Journal(tmp_path / "missing" / "journal.sqlite").start()


def test_close_writes_everything_that_was_handed_over(path: Path) -> None:
    journal = Journal(path)
    journal.start()
    futures = [journal.put(answer(sha(str(i)))) for i in range(1200)]
    journal.close()
    assert all(future.done() for future in futures)
    assert len(stored(path)) == 1200


@pytest.mark.usefixtures("at_once")
def test_reader_sees_whole_answers_while_another_thread_writes(journal: Journal, path: Path) -> None:
    def write() -> None:
        for i in range(150):
            journal.put(answer(sha(str(i)), content=str(i) * 50)).result(WAIT_S)

    writer = threading.Thread(target=write)
    writer.start()
    counts = [0]
    while writer.is_alive():
        read = stored(path)
        assert all(a.content and a.output_ids == [4, 5] for a in read.values())
        counts.append(len(read))
    writer.join(WAIT_S)
    assert counts == sorted(counts)
    assert len(stored(path)) == 150


def test_reader_of_a_missing_or_new_journal_finds_nothing(path: Path) -> None:
    reader = JournalReader(path)
    assert (list(reader.keys()), reader.partitions(), reader.recall("x")) == ([], {}, None)
    assert not path.exists(), "looking makes no file"
    path.touch()
    assert (list(reader.keys()), reader.partitions(), reader.recall("x")) == ([], {}, None)


def test_reader_keeps_partitions_apart(journal: Journal, path: Path) -> None:
    for name, n in (("A", 3), ("B", 2)):
        for i in range(n):
            journal.put(answer(sha(f"{name}{i}"), partition=name)).result(WAIT_S)
    reader = JournalReader(path)
    assert reader.partitions().keys() == {"A", "B"}
    assert all(size > 0 for size in reader.partitions().values())
    hashes = [a.prompt_hash for a in reader.answers("A")]
    assert hashes == sorted(sha(f"A{i}") for i in range(3))


def test_reader_looks_up_more_hashes_than_one_statement_takes(journal: Journal, path: Path) -> None:
    futures = [journal.put(answer(sha(str(i)))) for i in range(1100)]
    futures[-1].result(WAIT_S)
    wanted = [sha(str(i)) for i in range(2200)]
    assert len(list(JournalReader(path).lookup(wanted))) == 1100


def test_forget_removes_what_was_sealed_and_keeps_what_was_replaced_since(
    journal: Journal, path: Path
) -> None:
    sealed = [answer(sha("a")), cut(sha("b"), 64), answer(sha("c"), status="failed", finish_reason="")]
    for given in sealed:
        journal.put(given).result(WAIT_S)
    journal.put(answer(sha("b"), max_new_tokens=128)).result(WAIT_S)
    journal.put(answer(sha("c"))).result(WAIT_S)
    journal.forget(sealed)
    assert stored(path).keys() == {sha("b"), sha("c")}


def test_remember_gives_a_later_run_the_last_value(path: Path) -> None:
    for value in ({"fraction": 0.93}, {"fraction": 0.88}):
        journal = Journal(path)
        journal.start()
        journal.remember("remedy", value)
        journal.close()
    assert JournalReader(path).recall("remedy") == {"fraction": 0.88}
    assert JournalReader(path).recall("other") is None


def test_lock_held_names_the_holder_and_is_free_after_release(path: Path) -> None:
    first, second = JournalLock(path), JournalLock(path)
    assert second.holder() == ""
    first.acquire("run nightly")
    assert second.holder() == f"pid {os.getpid()}, run nightly"
    with pytest.raises(LockHeld, match=rf"pid {os.getpid()}, run nightly"):
        second.acquire("another")
    first.release()
    assert second.holder() == ""
    second.acquire("another")
    second.release()


def test_lock_of_another_process_is_freed_by_its_sigkill(path: Path) -> None:
    code = """
import sys
from pathlib import Path
from promptmill.store.journal import JournalLock
JournalLock(Path(sys.argv[1])).acquire("run of somebody else")
print("held", flush=True)
sys.stdin.read()
"""
    other = start_python(code, str(path))
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        lock = JournalLock(path)
        with pytest.raises(LockHeld, match=rf"pid {other.pid}, run of somebody else"):
            lock.acquire("mine")
    finally:
        end(other)
    assert lock.holder() == ""
    lock.acquire("mine")
    lock.release()


def test_lock_is_taken_although_somebody_looks_at_its_holder_just_then(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = JournalLock(path)
    lock.path.touch()
    looking = lock.path.open("rb")
    flock = fcntl.flock
    flock(looking, fcntl.LOCK_SH)  # what `promptmill status` does for a moment
    refused = []

    def observed(file: Any, operation: int) -> None:
        try:
            flock(file, operation)
        except BlockingIOError:
            refused.append(operation)
            looking.close()
            raise

    monkeypatch.setattr(fcntl, "flock", observed)
    lock.acquire("run")
    lock.release()
    assert refused


def test_lock_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file"):
        JournalLock(tmp_path / "file" / "journal.sqlite").acquire("run")


ORDER = [sha(str(n)) for n in range(40)]


def killed(path: Path, folder: Path, checkpointed: bool) -> Path:
    """What a writer that was killed left: 40 answers in the file, in its log, or half and half."""
    journal = Journal(path)
    journal.start()
    for n in range(40):
        journal.put(answer(sha(str(n)), content="x" * 7000)).result(WAIT_S)
        if checkpointed and n == 30:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    left = folder / "left.sqlite"
    for suffix in ("", "-wal"):
        shutil.copy(path.with_name(path.name + suffix), left.with_name(left.name + suffix))
    journal.close()
    return left


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.999])
@pytest.mark.usefixtures("at_once")
def test_log_that_is_torn_keeps_the_answers_before(
    share: float, checkpointed: bool, path: Path, tmp_path: Path
) -> None:
    left = killed(path, tmp_path, checkpointed)
    wal = left.with_name(left.name + "-wal")
    os.truncate(wal, int(wal.stat().st_size * share))
    journal = Journal(left)
    journal.start()
    found = stored(left)
    journal.close()
    assert found.keys() == set(ORDER[: len(found)])
    assert (31 if checkpointed else 0) <= len(found) < 40


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.7, 0.9])
@pytest.mark.usefixtures("at_once")
def test_file_that_is_torn_is_not_begun_anew(share: float, path: Path, tmp_path: Path) -> None:
    left = killed(path, tmp_path, checkpointed=True)
    os.truncate(left, int(left.stat().st_size * share))
    for _ in range(2):  # it is as damaged the next time
        with pytest.raises(StoreError, match=f"journal {left} is damaged: .* Move {left} away"):
            Journal(left).start()


@pytest.mark.usefixtures("at_once")
def test_log_without_its_file_is_not_deleted(path: Path, tmp_path: Path) -> None:
    left = killed(path, tmp_path, checkpointed=False)
    os.truncate(left, 0)
    with pytest.raises(StoreError, match="the file is empty, and its log is not"):
        list(JournalReader(left).keys())
    left.unlink()
    with pytest.raises(StoreError, match="Move"):
        Journal(left).start()
    assert left.with_name("left.sqlite-wal").stat().st_size > 100_000
