"""The row store: what is done, from segments and journal as one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from promptmill.errors import ConfigError, LockHeld, StoreError
from promptmill.settings import Profile
from promptmill.store.index import Known, supersedes
from promptmill.store.journal import Journal, JournalReader
from promptmill.store.segments import Segments
from promptmill.store.store import (
    Store,
    check_disk,
    journal_path,
    next_pending,
)
from promptmill.types import STATUSES, Answer
from tests.helpers_store import (
    ROOT,
    answer,
    cut,
    end,
    failed,
    keys_of,
    make_manifest,
    make_profile,
    sha,
    start_python,
)

WAIT_S = 60
CAP = 64


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return make_profile(tmp_path)


@pytest.fixture
def store(profile: Profile) -> Iterator[Store]:
    opened = Store(profile)
    opened.open("test")
    yield opened
    opened.close()


def put(store: Store, *answers: Answer) -> None:
    for given in answers:
        store.put(given).result(WAIT_S)


def journaled(store: Store) -> set[str]:
    keys = JournalReader(store.journal_path).keys()
    return {prompt_hash for prompt_hash, *_ in keys}


def sealed(store: Store) -> list[str]:
    """Hashes in the segments, one entry a row."""
    segments = Segments(store.folder)
    return [h for table in segments.keys(segments.names()) for h in table.column("prompt_hash").to_pylist()]


def counts(**some: int) -> dict[str, int]:
    return {**dict.fromkeys(STATUSES, 0), **some}


def reread(profile: Profile) -> Store:
    """A store as another process sees it."""
    other = Store(profile)
    other.refresh()
    return other


def test_open_by_a_second_store_is_refused_and_possible_after_close(profile: Profile) -> None:
    first, second = Store(profile), Store(profile)
    first.open("first run")
    with pytest.raises(LockHeld, match="first run"):
        second.open("second run")
    first.close()
    second.open("second run")
    second.close()


def test_open_that_fails_frees_the_lock_and_ends_its_thread(profile: Profile) -> None:
    store = Store(profile)
    broken = Path(profile.store.url) / "segments/P/00000000000001-00000000.parquet"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"torn")
    threads = threading.active_count()
    with pytest.raises(StoreError, match=r"00000000000001-00000000\.parquet"):
        store.open("run")
    assert store.lock.holder() == ""
    assert threading.active_count() == threads
    broken.unlink()
    again = Store(profile)
    again.open("run")
    again.close()


def test_open_on_a_journal_that_is_none_frees_the_lock(profile: Profile) -> None:
    path = journal_path(profile)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a journal at all\n" * 100)
    store = Store(profile)
    with pytest.raises(StoreError, match=r"journal\.sqlite"):
        store.open("run")
    assert store.lock.holder() == ""


def test_put_is_known_here_and_to_a_store_that_only_reads(store: Store, profile: Profile) -> None:
    put(store, answer(sha("a")))
    for seen in (store, reread(profile)):
        assert seen.is_done(sha("a"), CAP)
        assert not seen.is_done(sha("b"), CAP)
        assert seen.known(sha("a")) == Known("answered", "stop", CAP)


def test_put_that_fails_is_not_known(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("promptmill.store.journal._execute", broken)
    with pytest.raises(StoreError, match="disk is full"):
        store.put(answer(sha("a"))).result(WAIT_S)
    assert not store.is_done(sha("a"), CAP)


async def all_at_once(store: Store, path: Path, answers: list[Answer]) -> tuple[list[Any], int]:
    """What `keep` gives for answers that wait together, the third one cancelled; and wake-ups of the loop."""
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    tasks = [asyncio.create_task(store.keep(one)) for one in answers]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.sleep(0.05)
    assert [task.done() for task in tasks].count(True) == 1, "nothing is durable yet"
    loop, woken = asyncio.get_running_loop(), 0
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal woken
        woken += 1
        return call_soon_threadsafe(*args, **kwargs)

    with patch.object(loop, "call_soon_threadsafe", counted):
        blocker.execute("ROLLBACK")
        blocker.close()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), WAIT_S)
    return results, woken


def test_keep_wakes_a_loop_once_a_commit_and_keeps_what_nobody_waits_for(store: Store) -> None:
    answers = [answer(sha(str(i))) for i in range(50)]
    results, woken = asyncio.run(all_at_once(store, store.journal_path, answers))
    assert [type(result) for result in results if result] == [asyncio.CancelledError]
    assert woken <= 2  # the first may have a commit of its own
    assert journaled(store) == {one.prompt_hash for one in answers}
    assert all(store.is_done(one.prompt_hash, CAP) for one in answers)


def test_keep_that_fails_tells_everyone_and_nothing_is_known(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("promptmill.store.journal._execute", broken)
    answers = [answer(sha(str(i))) for i in range(50)]
    results, _ = asyncio.run(all_at_once(store, store.journal_path, answers))
    assert isinstance(results.pop(2), asyncio.CancelledError)
    assert {type(result) for result in results} == {StoreError}
    assert journaled(store) == set()
    assert not any(store.is_done(one.prompt_hash, CAP) for one in answers)


def test_keep_outlives_a_loop_that_ended_meanwhile(store: Store) -> None:
    async def leave() -> None:
        task = asyncio.create_task(store.keep(answer(sha("a"))))
        await asyncio.sleep(0)
        task.cancel()

    blocker = sqlite3.connect(store.journal_path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    asyncio.run(leave())
    blocker.execute("ROLLBACK")
    blocker.close()
    put(store, answer(sha("b")))
    assert journaled(store) == {sha("a"), sha("b")}


def test_seal_moves_answers_and_leaves_none_twice(store: Store, profile: Profile) -> None:
    given = [answer(sha(str(i))) for i in range(30)]
    put(store, *given, answer(sha("other"), partition="Q"))
    assert store.seal("P") == 30
    assert journaled(store) == {sha("other")}
    assert sorted(sealed(store)) == sorted(a.prompt_hash for a in given)
    assert store.seal("P") == 0
    assert store.seal_all() == 1
    assert journaled(store) == set()
    assert len(sealed(store)) == 31
    other = reread(profile)
    assert all(other.is_done(a.prompt_hash, CAP) for a in given)
    assert other.lookup([a.prompt_hash for a in given]) == {a.prompt_hash: a for a in given}


def test_seal_below_the_wanted_size_does_nothing(store: Store) -> None:
    put(store, answer(sha("a")))
    assert store.seal("P", at_least=1_000_000) == 0
    assert store.seal("unknown") == 0
    assert (journaled(store), sealed(store)) == ({sha("a")}, [])


@pytest.mark.parametrize(("bound", "most"), [("_SEAL_ROWS", 10), ("_SEAL_TOKENS", 50)])
def test_seal_of_more_than_one_segment_takes_leaves_none_out(
    store: Store, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(f"promptmill.store.store.{bound}", most)
    put(store, *(answer(sha(str(i))) for i in range(25)))  # of 5 tokens each
    assert store.seal("P") == 25
    assert (journaled(store), len(set(sealed(store))), len(sealed(store))) == (set(), 25, 25)
    assert len(Segments(store.folder).names()) == 3


def while_sealing(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Run `action` once, when a segment was written and the journal has not forgotten its rows yet."""
    forget = Journal.forget

    def forget_after(self: Journal, answers: list[Answer]) -> None:
        monkeypatch.setattr(Journal, "forget", forget)
        action()
        forget(self, answers)

    monkeypatch.setattr(Journal, "forget", forget_after)


def test_seal_keeps_an_answer_that_was_replaced_meanwhile(
    store: Store, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = cut(sha("a"), 32), answer(sha("a"), max_new_tokens=CAP)
    put(store, old, answer(sha("b")))
    while_sealing(monkeypatch, lambda: put(store, new))
    store.seal("P")
    assert reread(profile).lookup([sha("a")]) == {sha("a"): new}
    store.seal_all()
    assert journaled(store) == set()
    assert reread(profile).lookup([sha("a")]) == {sha("a"): new}


def test_seal_keeps_an_answer_that_came_meanwhile(
    store: Store, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, answer(sha("a")))
    while_sealing(monkeypatch, lambda: put(store, answer(sha("b"))))
    assert store.seal("P") == 1
    assert (journaled(store), sealed(store)) == ({sha("b")}, [sha("a")])
    assert reread(profile).lookup([sha("a"), sha("b")]).keys() == {sha("a"), sha("b")}


def test_seal_leaves_what_is_held_since_it_began(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that came between two segments is not confirmed either."""

    def come() -> None:
        put(store, answer(sha("b")))
        store.held = lambda: {sha("b")}

    monkeypatch.setattr("promptmill.store.store._SEAL_ROWS", 1)
    put(store, answer(sha("a")))
    while_sealing(monkeypatch, come)
    assert store.seal("P") == 1
    assert (journaled(store), sealed(store)) == ({sha("b")}, [sha("a")])


def test_seal_interrupted_before_the_journal_forgets_counts_once(
    tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = make_manifest(tmp_path, ["one", "two", "three"])
    hashes = [row[0][0] for row in keys_of(manifest)]
    store = Store(profile)
    store.open("test")

    def interrupted() -> None:
        raise KeyboardInterrupt

    put(store, *(answer(h) for h in hashes[:2]))
    while_sealing(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.seal("P")
    store.close()
    assert (len(journaled(store)), len(sealed(store))) == (2, 2)

    again = Store(profile)
    again.open("test")
    assert again.tally(manifest).to_json() == counts(rows=3, answered=2, pending=1)
    assert len(again.lookup(hashes)) == 2
    assert again.seal("P") == 2
    assert len(again.lookup(hashes)) == 2
    assert again.tally(manifest).counts["answered"] == 2
    again.close()


def test_seal_that_cannot_write_keeps_the_answers_in_the_journal(store: Store, profile: Profile) -> None:
    put(store, answer(sha("a")))
    (Path(profile.store.url) / "segments").write_text("in the way")
    with pytest.raises(StoreError, match="segments/P"):
        store.seal("P")
    assert journaled(store) == {sha("a")}


def test_close_by_sigkill_loses_nothing_that_was_durable(tmp_path: Path, profile: Profile) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from tests.helpers_store import answer, make_profile, sha
from promptmill.store.store import Store
store = Store(make_profile(Path(sys.argv[1]))); store.open("to be killed")
for i in range(10**9):
    store.put(answer(sha(str(i)))).result()
    if i % 5 == 4:
        store.seal("P")
    print(i, flush=True)
"""
    writer = start_python(code, str(tmp_path))
    try:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(23)]
    finally:
        end(writer)
    store = Store(profile)
    store.open("next")
    assert all(store.is_done(sha(str(i)), CAP) for i in seen)
    store.seal_all()
    assert len(store.lookup([sha(str(i)) for i in seen])) == len(seen)
    store.close()


ANSWERED, FAILED = Known("answered", "stop", 64), Known("failed", "", 64)
CUT, CUT_LATER = Known("truncated", "length", 64), Known("truncated", "length", 128)


@pytest.mark.parametrize(
    ("new", "old", "wins"),
    [
        (ANSWERED, ANSWERED, False),  # the first wins
        (Known("answered", "stop", 128), ANSWERED, False),
        (CUT_LATER, ANSWERED, False),
        (ANSWERED, FAILED, True),
        (CUT, FAILED, True),
        (FAILED, FAILED, False),
        (FAILED, ANSWERED, False),
        (Known("failed", "", 128), CUT, False),
        (CUT_LATER, CUT, True),  # it had more room
        (Known("answered", "stop", 128), CUT, True),
        (CUT, CUT_LATER, False),
        (ANSWERED, CUT, False),
    ],
)
def test_supersedes_follows_the_rules(new: Known, old: Known, wins: bool) -> None:
    assert supersedes(new, old) is wins


def test_is_done_asks_again_only_for_what_was_cut_below_the_cap(store: Store) -> None:
    put(store, answer(sha("whole")), cut(sha("cut"), CAP), failed(sha("failed")))
    assert all(store.is_done(sha(name), CAP) for name in ("whole", "cut", "failed"))
    assert not store.is_done(sha("cut"), CAP + 1)
    assert store.is_done(sha("cut"), CAP - 1)
    assert store.is_done(sha("whole"), 10 * CAP)
    assert store.is_done(sha("failed"), 10 * CAP)
    assert store.is_done(sha("failed"), CAP, retry_failed=True), "not twice in one run"
    store._failed_here.clear()  # a later run
    assert not store.is_done(sha("failed"), CAP, retry_failed=True)
    assert store.is_done(sha("cut"), CAP, retry_failed=True)


@pytest.mark.parametrize("sealed_first", [True, False])
def test_lookup_and_known_agree_on_the_winner_wherever_both_lie(
    store: Store, profile: Profile, sealed_first: bool
) -> None:
    first = [cut(sha("redone"), 32), failed(sha("retried")), answer(sha("kept"), content="first")]
    second = [
        answer(sha("redone"), max_new_tokens=64, content="with more room"),
        answer(sha("retried"), content="at last"),
    ]
    put(store, *first)
    if sealed_first:
        store.seal_all()
        Segments(store.folder).write("P", [answer(sha("kept"), content="of another host")])
    put(store, *second)
    for seal in (False, True):
        if seal:
            store.seal_all()
        other = reread(profile)
        found = other.lookup([a.prompt_hash for a in first])
        assert {h: a.content for h, a in found.items()} == {
            sha("redone"): "with more room",
            sha("retried"): "at last",
            sha("kept"): "first",
        }
        assert {h: other.known(h) for h in found} == {
            h: Known(a.status, a.finish_reason, a.max_new_tokens) for h, a in found.items()
        }


def test_with_flag_finds_status_and_flag_in_segments_and_journal(store: Store) -> None:
    put(store, answer(sha("a"), flags=["repetition"], status="flagged"), answer(sha("b")))
    store.seal_all()
    put(store, answer(sha("c"), flags=["repetition"], status="flagged"), failed(sha("d")))
    assert store.with_flag("repetition") == {sha("a"), sha("c")}
    assert store.with_flag("flagged") == {sha("a"), sha("c")}
    assert store.with_flag("failed") == {sha("d")}
    assert store.with_flag("none") == set()


def test_with_flag_misses_no_answer_that_is_sealed_at_that_moment(
    store: Store, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, answer(sha("a"), flags=["x"], status="flagged"))
    other = reread(profile)
    names = Segments.names

    def names_then_seal(self: Segments) -> list[str]:
        found = names(self)
        monkeypatch.setattr(Segments, "names", names)
        store.seal_all()
        return found

    monkeypatch.setattr(Segments, "names", names_then_seal)
    assert other.with_flag("x") == {sha("a")}


def put_chain(store: Store, hashes: list[str], *statuses: str) -> None:
    for turn, (prompt_hash, status) in enumerate(zip(hashes, statuses, strict=False)):
        reason = {"truncated": "length", "failed": ""}.get(status, "stop")
        put(store, answer(prompt_hash, turn=turn, status=status, finish_reason=reason))


def test_tally_sums_to_the_rows_read_with_rejects_turns_and_samples(tmp_path: Path, store: Store) -> None:
    rows = [["a", "b", "c"], None, ["d", "e"], "f", None, ["g", "h"], "i", "j", ["k", "l"]]
    manifest = make_manifest(tmp_path, rows, sampling={"samples": 2})
    assert (manifest.rows, manifest.prompts, manifest.rejected) == (9, 7, {"bad_json": 2})
    three, two, one, stopped, empty, broken, half = keys_of(manifest)
    for sample in range(2):
        put_chain(store, three[sample], "answered", "answered", "answered")
        put_chain(store, two[sample], "answered", *(["flagged"] if sample else ["answered"]))
    put_chain(store, one[0], "answered")  # its second sample is pending
    put_chain(store, stopped[0], "truncated")  # the second turn is never asked
    put_chain(store, stopped[1], "answered", "answered")
    put_chain(store, empty[0], "empty")
    put_chain(store, empty[1], "truncated")
    put_chain(store, broken[0], "failed")
    put_chain(store, broken[1], "empty")
    put_chain(store, half[0], "answered", "answered")
    put_chain(store, half[1], "flagged")  # its second turn is pending
    tally = store.tally(manifest)
    assert tally.to_json() == {
        "rows": 9,
        "answered": 1,
        "truncated": 1,
        "empty": 1,
        "flagged": 1,
        "rejected": 2,
        "failed": 1,
        "pending": 2,
    }
    assert (tally.rows, tally.pending, tally.rejected) == (manifest.rows, 2, {"bad_json": 2})


def test_tally_counts_cut_rows_as_pending_once_the_cap_is_raised(tmp_path: Path, store: Store) -> None:
    manifest = make_manifest(tmp_path, ["a", "b"])
    first, second = (row[0][0] for row in keys_of(manifest))
    put(store, cut(first, CAP), answer(second))
    assert store.tally(manifest).counts["truncated"] == 1
    raised = make_manifest(tmp_path, ["a", "b"], classes={"short": {"max_new_tokens": 2 * CAP}})
    assert keys_of(raised) == keys_of(manifest), "the cap is no part of a prompt's identity"
    assert store.tally(raised).to_json() == counts(rows=2, answered=1, pending=1)


def test_tally_of_a_store_that_another_process_writes_is_right_at_any_moment(
    tmp_path: Path, profile: Profile
) -> None:
    manifest = make_manifest(tmp_path, [f"prompt {i}" for i in range(40)])
    hashes = [row[0][0] for row in keys_of(manifest)]
    code = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from tests.helpers_store import answer, make_profile
from promptmill.store.store import Store
store = Store(make_profile(Path(sys.argv[1]))); store.open("the run")
for i, prompt_hash in enumerate(json.loads(sys.argv[2])):
    store.put(answer(prompt_hash)).result()
    if i % 10 == 7:
        store.seal("P")
    print(i + 1, flush=True)
sys.stdin.read()
"""
    writer = start_python(code, str(tmp_path), json.dumps(hashes))
    try:
        assert writer.stdout is not None
        before = 0
        for line in writer.stdout:
            status = Store(profile)
            status.refresh()
            tally = status.tally(manifest)
            assert tally.rows == 40
            assert tally.counts["answered"] >= max(before, int(line))
            before = tally.counts["answered"]
            if int(line) == 40:
                break
        assert "the run" in Store(profile).lock.holder()
    finally:
        end(writer)
    assert before == 40


def test_refresh_misses_no_answer_that_is_sealed_at_that_moment(
    store: Store, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, answer(sha("a")))
    keys = JournalReader.keys

    def keys_then_seal(self: JournalReader) -> Iterator[tuple[str, str, str, int]]:
        found = list(keys(self))
        store.seal_all()
        return iter(found)

    other = Store(profile)
    monkeypatch.setattr(JournalReader, "keys", keys_then_seal)
    other.refresh()
    assert other.is_done(sha("a"), CAP)


def test_reading_a_store_that_does_not_exist_makes_nothing(tmp_path: Path, profile: Profile) -> None:
    store = reread(profile)
    assert store.lookup([sha("a")]) == {}
    assert store.recall("anything") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], 0),
        (["answered"], 1),
        (["flagged"], 1),
        (["answered", "answered"], 2),
        (["answered", "answered", "answered"], None),
        (["truncated"], None),
        (["empty"], None),
        (["answered", "failed"], None),
    ],
)
def test_next_pending_is_the_first_turn_without_an_answer(
    store: Store, statuses: list[str], expected: int | None
) -> None:
    hashes = [sha(name) for name in "abc"]
    put_chain(store, hashes, *statuses)
    assert next_pending(store, hashes, CAP, False) == expected


def test_next_pending_goes_back_to_a_cut_or_failed_turn(store: Store) -> None:
    hashes = [sha(name) for name in "abc"]
    put_chain(store, hashes, "answered", "truncated")
    assert next_pending(store, hashes, CAP, False) is None
    assert next_pending(store, hashes, 2 * CAP, False) == 1
    put_chain(store, [sha("d"), sha("e")], "failed")
    assert next_pending(store, [sha("d"), sha("e")], CAP, False) is None
    assert next_pending(store, [sha("d"), sha("e")], CAP, True) is None, "not twice in one run"
    store._failed_here.clear()  # a later run
    assert next_pending(store, [sha("d"), sha("e")], CAP, True) == 0


def test_count_takes_each_conversation_to_its_end(tmp_path: Path, store: Store) -> None:
    manifest = make_manifest(tmp_path, [["a", "b", "c"], "d", ["e", "f"], "g", "h"])
    three, one, two, lost, _ = (row[0] for row in keys_of(manifest))
    put_chain(store, three, "answered")
    put_chain(store, one, "answered")
    put_chain(store, two, "truncated")  # its second turn is never asked
    put_chain(store, lost, "failed")
    assert store.count(manifest, False) == (8, 1 + 1 + 2 + 1)
    assert store.count(manifest, True) == (8, 5), "not twice in one run"
    store._failed_here.clear()  # a later run
    assert store.count(manifest, True) == (8, 4)
    assert store.count(manifest, False) == (8, 5)


def test_remember_is_recalled_by_a_later_run(store: Store, profile: Profile) -> None:
    store.remember("remedies", {"fraction": 0.88})
    assert reread(profile).recall("remedies") == {"fraction": 0.88}


def test_journal_lies_inside_a_local_store_and_beside_a_remote_one(tmp_path: Path) -> None:
    assert journal_path(make_profile(tmp_path)) == tmp_path / "store/journal.sqlite"
    remote = make_profile(tmp_path, store={"url": "s3://bucket/store"})
    assert journal_path(remote).parent == Path("data")
    assert journal_path(remote) != journal_path(make_profile(tmp_path, store={"url": "s3://bucket/other"}))
    named = make_profile(tmp_path, store={"url": "s3://bucket/store", "journal": str(tmp_path / "j")})
    assert journal_path(named) == tmp_path / "j"


def test_check_disk_names_the_setting_where_too_little_is_free(tmp_path: Path) -> None:
    check_disk([tmp_path / "new"], 0.0)
    assert (tmp_path / "new").is_dir()
    with pytest.raises(ConfigError, match=r"run\.min_free_gib asks for 1e\+09"):
        check_disk([tmp_path], 1e9)


def test_check_disk_names_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/below"):
        check_disk([tmp_path / "file/below"], 0.0)


def test_store_is_imported_without_pandas_or_prefect() -> None:
    code = "import sys, promptmill.store.store; print([m for m in ('pandas', 'prefect') if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    assert result.stdout.strip() == "[]"
