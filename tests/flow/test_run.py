"""`promptmill run` as a user runs it: the real flow, a real Prefect API, the embedded engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import psutil
import pytest
from place import ANSWERS, GIVE_UP_S, ROWS, TEST_S, TOPICS, Place, wait_for

from promptmill.store.journal import JournalReader
from promptmill.types import Answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]

LOAD = """
import json, sys, datasets
pointer = json.load(open("data/release/latest.json"))
views = {}
for view in ("conversations", "turns"):
    rows = datasets.load_dataset(pointer["path"], view, split="train", cache_dir="data/hf")
    views[view] = [dict(row) for row in rows]
json.dump(views, sys.stdout)
"""


def load_release(place: Place) -> dict[str, list[dict[str, Any]]]:
    """Both views of the release, loaded in a new process as a user would."""
    loaded = place.run(sys.executable, "-c", LOAD)
    assert loaded.returncode == 0, loaded.stderr
    views: dict[str, list[dict[str, Any]]] = json.loads(loaded.stdout)
    return views


def engine(place: Place) -> psutil.Process:
    """The server's own process, which its keeper and its run have above them."""
    started = ["-m", "promptmill.serving.embedded"]
    (found,) = (process for process in place.processes() if process.cmdline()[1:3] == started)
    return found


def journaled(place: Place) -> dict[str, Answer]:
    reader = JournalReader(place.folder / "data/store/journal.sqlite")
    return {a.prompt_hash: a for name in ("A_text", "B_turns") for a in reader.answers(name)}


def test_run_killed_in_the_middle_goes_on_and_releases_every_prompt_once(small: Place) -> None:
    first = small.start("promptmill", "run", "small.toml", log="first.log")
    wait_for(lambda: len(journaled(small)) >= 4 or first.poll() is not None, "four answers")
    assert first.poll() is None, (small.folder / "first.log").read_text()
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert small.wait_until_empty() == []
    before = journaled(small)
    assert 4 <= len(before) < ANSWERS

    held = small.run("promptmill", "status", "small.toml", "--json")
    counts = json.loads(held.stdout)["partitions"]
    assert {name: part["rows"] for name, part in counts.items()} == ROWS
    assert all(sum(part.values()) == 2 * part["rows"] for part in counts.values())
    assert sum(part["pending"] for part in counts.values()) > 0

    second = small.run("promptmill", "run", "small.toml")
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"resuming: {len(before)} already done" in second.stdout
    assert second.stderr == ""
    assert small.wait_until_empty(0) == []

    views = load_release(small)
    turns = Counter(row["id"] for row in views["turns"])
    assert turns.keys() >= {f"a-{topic}" for topic in TOPICS}
    assert set(turns.values()) == {1}
    released = {row["prompt_hash"]: row for row in views["turns"]}
    for prompt_hash, answer in before.items():
        assert released[prompt_hash]["created_at"] == answer.created_at, "a finished prompt was asked again"
        assert released[prompt_hash]["input_ids"] == answer.prompt_ids + answer.output_ids
    for row in views["turns"]:
        assert len(row["input_ids"]) == len(row["loss_mask"])
        assert sum(row["loss_mask"]) == row["completion_tokens"]


def test_run_stopped_by_hand_ends_with_status_3_and_a_second_run_is_refused_meanwhile(small: Place) -> None:
    patient = f"server.inactivity_timeout_s={GIVE_UP_S}"
    one = "server.flags.parallel=1"
    slow = small.start("promptmill", "run", "small.toml", "--set", one, "--set", patient, log="first.log")
    wait_for(lambda: len(journaled(small)) >= 2 or slow.poll() is not None, "two answers")
    server = engine(small)
    server.suspend()  # or the first run might be over before it is asked to stop
    second = small.run("promptmill", "run", "small.toml")
    assert second.returncode == 1
    assert f"pid {slow.pid}" in second.stderr
    assert len(second.stderr.splitlines()) == 1

    assert small.run("promptmill", "stop", "small.toml").returncode == 0
    server.resume()
    try:
        assert slow.wait(timeout=GIVE_UP_S) == 3, (small.folder / "first.log").read_text()
    except subprocess.TimeoutExpired:
        slow.kill()
        raise
    assert "stopped: promptmill stop was called" in (small.folder / "first.log").read_text()
    assert not (small.folder / "data/release/latest.json").exists()
    assert small.wait_until_empty(0) == []
