"""One round of chaos: faults drawn from a seed, a small run under them, and what holds after it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from promptmill.profile import load_profile
from promptmill.serving.keeper import LIFE_MARK
from promptmill.store.store import Store
from tests.chaos.rogue import Burst, Plan, asked
from tests.chaos.small_run import MODEL, durable, run_in_child
from tests.contract.play import FLAGS, SETTINGS
from tests.contract.sglang_place import Engine

# Forked from a process that has imported everything already, which takes seconds of CPU.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.chaos.preloaded"])
MARK = "CHAOS_MARK"
SINGLES, DIALOGUES, DUPLICATES = 26, 7, 4
ANSWERS = SINGLES + DIALOGUES
"""Prompts of one turn; the last turns of the one longer conversation come on top."""
STARTS = 6
ENDED_S, GONE_S = 600.0, 60.0
SMALL = [
    "sampling.temperature=0",
    "server.stream_interval=4",
    "classes.short.max_new_tokens=100",
    "run.min_free_gib=0",
    "server.startup_silence_timeout_s=20",
]
PACE = {"sim-speed": 5, "sim-start-s": 2, "sim-mean-output": 45}
SECOND_PARTITION = """
[[partitions]]
name = "B_turns"
source = "{folder}/b.jsonl"
format = "turns"
"""

KINDS = {
    "deadly": 3,
    "passing": 2,
    "start": 1,
    "burst": 3,
    "signal": 3,
    "client": 3,
    "torn": 2,
    "disk": 1,
    "stop": 1,
}
"""What is drawn, and how often."""
DEADLY = ("die", "oom", "kv-oom", "illegal", "zombie", "freeze", "lost", "nccl")
PASSING = ("freeze:4", "busy:20", "full:8", "cut", "http500:2")
STARTING = ("start:kv", "start:graph-oom", "start:killed", "start:dist-port", "start:warmup")
BURSTS = (
    "429",
    "503",
    "500",
    "abort:0",
    "abort:503",
    "abort:500",
    "error:500",
    "error:503",
    "half",
    "cut:0",
    "cut:9",
)
SIGNALS = ("kill main", "kill scheduler", "kill keeper", "pause scheduler", "pause main")


@dataclass(frozen=True)
class Moment:
    """When so many answers are durable, and `delay_s` later, `what` happens."""

    answers: int
    delay_s: float
    what: str
    requests: int = 0
    """So many have been asked for since the moment before."""


@dataclass
class Script:
    """What was drawn."""

    plan: Plan = field(default_factory=Plan)
    moments: list[Moment] = field(default_factory=list)


def draw(seed: int, number: int) -> Script:
    """One to three faults and their moments; the same ones for the same numbers."""
    chance = random.Random(f"{seed}/{number}")
    script = Script()
    lives = script.plan.lives
    for _ in range(chance.randint(1, 3)):
        answers, delay_s = chance.randint(0, ANSWERS - 5), chance.choice([0.0, chance.uniform(0, 0.3)])
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "deadly":
            lives.append([f"{chance.choice(DEADLY)}@answers={chance.randint(1, 14)}"])
        elif kind == "passing":
            script.plan.always.append(f"{chance.choice(PASSING)}@answers={chance.randint(1, 20)}")
        elif kind == "start" and [fault for life in lives for fault in life if "start:" in fault] == []:
            lives.append([chance.choice(STARTING)])
        elif kind == "burst":
            script.plan.bursts.append(
                Burst(chance.randint(1, ANSWERS), round(chance.uniform(0, 1), 2), chance.choice(BURSTS))
            )
        elif kind == "disk":
            script.plan.room = (answers + 1, chance.randint(0, 40_000))
        elif kind == "torn":
            part, share = chance.choice(["-wal", "main"]), chance.random() * (chance.random() < 0.9)
            script.moments.append(Moment(answers, delay_s, f"tear {part} {share:.4f}"))
        elif kind == "signal":
            script.moments.append(Moment(answers, delay_s, chance.choice(SIGNALS)))
        elif kind == "stop":
            script.moments.append(Moment(answers, delay_s, "stop"))
        else:
            early = chance.random() < 0.3
            at = Moment(0, chance.uniform(0, 3), "client") if early else Moment(answers, delay_s, "client")
            script.moments.append(at)
    chance.shuffle(lives)
    script.moments.sort(key=lambda moment: moment.answers)
    return script


def write_place(folder: Path, model: Path, plan: Plan) -> Path:
    """Two partitions with some prompts in common, and a conversation of three turns; returns the profile."""
    texts = [f"Tell me about {n}." for n in range(SINGLES)]
    singles = [*texts, *texts[3 : 3 + DUPLICATES]]
    dialogues = [[f"What is {n}?"] for n in range(DIALOGUES)] + [[texts[5]], ["Who?", "When?", "And where?"]]
    _write_lines(folder / "a.jsonl", singles)
    _write_lines(folder / "b.jsonl", dialogues)
    rogue = [sys.executable, "-m", "tests.chaos.rogue", str(folder)]
    profile = Engine(rogue, model, flags=FLAGS).write_profile(folder, **PACE)
    with profile.open("a", encoding="utf-8") as file:
        file.write(SECOND_PARTITION.format(folder=folder))
    plan.write(folder)
    return profile


def _write_lines(path: Path, prompts: Sequence[Any]) -> None:
    lines = [json.dumps({"id": f"r{n}", "prompt": prompt}) for n, prompt in enumerate(prompts)]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


class Trial:
    """A run in its folder, started as often as it takes, and its books."""

    def __init__(self, folder: Path, profile: Path, settings: Sequence[str] = (), quick: bool = True) -> None:
        self.folder = folder
        self.store = Store(load_profile(str(profile), [*SETTINGS, *settings]))
        self.happened: list[str] = []
        self.lost: list[tuple[float, set[str]]] = []
        """When, and which answers a torn journal had no longer."""
        self.kept: list[tuple[float, set[str]]] = []
        """When, and which answers were found when nobody wrote."""
        self.outcome: dict[str, Any] = {}
        self.unkept: set[str] = set()
        """Lives whose keeper was killed."""
        self._profile = str(profile)
        self._model = load_profile(str(profile), []).model_path
        self._settings = list(settings)
        self._mark = uuid.uuid4().hex
        self._env = {MARK: self._mark, "CHAOS_QUICK": "1" if quick else ""}

    def start(self) -> BaseProcess:
        os.environ.setdefault(MODEL, str(self._model))  # for the process that is forked from
        (self.folder / "outcome.json").unlink(missing_ok=True)
        process = _FORKS.Process(
            target=run_in_child, args=(self._profile, [*SETTINGS, *self._settings], self._env)
        )
        process.start()
        return process

    def ended(self, process: BaseProcess) -> int:
        """Nothing of it is left; `outcome` is what it said.

        A server whose keeper and client are killed in one moment is left to the next run.
        """
        process.join()
        status = process.exitcode or 0
        process.close()
        allowed = self.unkept if status < 0 else set()
        deadline = time.monotonic() + GONE_S
        while left := [one for one in self.processes() if _life(one) not in allowed]:
            assert time.monotonic() < deadline, f"left behind: {[_words(p) for p in left]}"
            time.sleep(0.05)
        traces = [path.name for path in (self.folder / "store/servers").glob("*.yaml")]
        assert status < 0 or not traces, f"left behind: {traces}"
        path = self.folder / "outcome.json"
        self.outcome = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return status

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                marked = process.environ().get(MARK) == self._mark
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def end(self) -> None:
        """Whatever became of it."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()

    def server(self, who: str) -> psutil.Process | None:
        """`main`, `scheduler` or `keeper` of the server that runs, if one does."""
        for process in self.processes():
            with suppress(psutil.Error):
                words = _words(process)
                is_keeper = "serving/keeper.py" in words
                is_main = "tests.chaos.rogue" in words and not is_keeper
                named = {"keeper": is_keeper, "main": is_main, "scheduler": "sglang::scheduler" in words}
                if named[who]:
                    return process
        return None

    def count(self, book: str) -> int:
        """Lines of a book."""
        path = self.folder / book
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def keys(self) -> set[str]:
        """Hashes of all answers that are in the store. Raises StoreError."""
        # The journal first: answers move from there to segments.
        journaled = {key[0] for key in self.store._reader.keys()}  # noqa: SIM118  no dict
        return journaled | self.sealed()

    def sealed(self) -> set[str]:
        segments = self.store._segments
        return {
            prompt_hash
            for table in segments.keys(segments.names())
            for prompt_hash in table.column("prompt_hash").to_pylist()
        }

    def note_kept(self) -> None:
        self.kept.append((time.monotonic(), self.keys()))

    def tear(self, suffix: str, share: float) -> bool:
        """Cut the journal, or its log, off after a share of its bytes; returns whether there was one."""
        path = self._journal(suffix)
        if not path.exists():
            return False
        before = self.keys()
        if not suffix and share:  # all but its first page is in the log; SQLite itself moves it every 4 MB
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
        os.truncate(path, int(size * share))
        self.happened.append(f"cut {path.name} of {size} bytes off at {int(size * share)}")
        self.lost.append((time.monotonic(), before - self.sealed() - self._readable()))
        return True

    def _readable(self) -> set[str]:
        """What SQLite finds in a copy, so that the journal itself is left as it is."""
        copy = self.folder / "copy.sqlite"
        for suffix in ("", "-wal"):
            if (path := self._journal(suffix)).exists():
                shutil.copy(path, copy.with_name(copy.name + suffix))
        try:
            if not copy.exists() or not copy.stat().st_size:
                return set()
            with closing(sqlite3.connect(copy)) as connection:
                return {key for (key,) in connection.execute("SELECT prompt_hash FROM answers")}
        except sqlite3.Error:
            return set()
        finally:
            for suffix in ("", "-wal", "-shm"):
                copy.with_name(copy.name + suffix).unlink(missing_ok=True)

    def move_journal_away(self) -> None:
        """What the error about a torn journal asks for."""
        before = set() if not self.lost else self.lost[-1][1]
        everything = {d.prompt_hash for d in durable(self.folder)} | (
            self.kept[-1][1] if self.kept else set()
        )
        self.lost.append((time.monotonic(), before | (everything - self.sealed())))
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                path = self._journal(suffix)
                path.rename(path.with_name(f"torn-{uuid.uuid4().hex}{suffix}"))

    def _journal(self, suffix: str) -> Path:
        path = self.store.journal_path
        return path.with_name(path.name + suffix)

    def check_books(self) -> None:
        """Nothing was answered twice, and nothing asked for that was durable."""
        hashes = {d.prompt_hash for d in durable(self.folder)} | self.keys()
        by_key = {prompt_hash[:16]: prompt_hash for prompt_hash in hashes}
        assert len(by_key) == len(hashes)
        story: list[tuple[float, str, str]] = []
        story += [(d.at, "durable", d.prompt_hash) for d in durable(self.folder)]
        story += [(at, "lost", h) for at, lost in self.lost for h in lost]
        story += [(at, "kept", h) for at, kept in self.kept for h in kept]
        story += [(a.at, "asked", by_key[a.key]) for a in asked(self.folder)]
        done: set[str] = set()
        for _, what, prompt_hash in sorted(story):
            if what == "lost":
                done.discard(prompt_hash)
                continue
            assert what == "kept" or prompt_hash not in done, f"{prompt_hash} is {what} though it was done"
            if what != "asked":
                done.add(prompt_hash)
        assert done == self.keys(), "what the store holds is not what was told to be durable"


def _words(process: psutil.Process) -> str:
    return " ".join([process.name(), *process.cmdline()])


def _life(process: psutil.Process) -> str:
    """The life of a server that it belongs to; empty for what has gone, or belongs to none."""
    with suppress(psutil.Error):
        return process.environ().get(LIFE_MARK, "")
    return ""


class Release:
    """What stands at the release's address, read with nothing but pyarrow."""

    def __init__(self, folder: Path) -> None:
        pointer = json.loads((folder / "latest.json").read_text(encoding="utf-8"))
        place = folder / pointer["revision"]
        self.manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
        self.rows: dict[str, int] = {}
        self.turns: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        """Ids and loss mask, by partition and id."""
        for name in self.manifest["files"]:
            table = pq.read_table(place / name)
            view = name.split("/")[-2] if name.split("/")[-2] in self.manifest["rows"] else name.split("/")[0]
            self.rows[view] = self.rows.get(view, 0) + table.num_rows
            if "loss_mask" in table.column_names:
                for row in table.to_pylist():
                    key = row["partition"], row["id"]
                    assert key not in self.turns, f"{key} is there twice"
                    self.turns[key] = row["input_ids"], row["loss_mask"]
        assert self.rows == self.manifest["rows"]
        for counts in self.manifest["accounting"].values():
            given = dict(counts)
            assert given.pop("rows") == sum(given.values())
            assert given["pending"] == given["failed"] == 0


def play(folder: Path, model: Path, script: Script) -> Trial:
    """The run, through its faults, to its release. Raises AssertionError where something does not hold."""
    trial = Trial(folder, write_place(folder, model, script.plan), SMALL)
    try:
        _play(trial, script)
    finally:
        trial.end()
    trial.check_books()
    return trial


def _play(trial: Trial, script: Script) -> None:
    coming = deque(script.moments)
    for _ in range(STARTS):
        process = trial.start()
        done = disturb(trial, process, coming)
        status = trial.ended(process)
        if status == 0:
            trial.note_kept()
            return
        _accept_end(trial, script, status, done)
    raise AssertionError(f"not over after {STARTS} starts")


def disturb(trial: Trial, process: BaseProcess, coming: deque[Moment], limit_s: float = ENDED_S) -> str:
    """What is due while the process runs, until it ends; returns what ended it, if that was us."""
    started, ended_by = time.monotonic(), ""
    requests = trial.count("asked")
    seen: tuple[Moment, float] | None = None
    while process.is_alive():
        now = time.monotonic()
        assert now - started < limit_s, "it hangs"
        if coming and not ended_by:
            moment = coming[0]
            if (
                (seen is None or seen[0] is not moment)
                and trial.count("durable") >= moment.answers
                and trial.count("asked") - requests >= moment.requests
            ):
                seen = moment, now
            if seen is not None and seen[0] is moment and now - seen[1] >= moment.delay_s:
                coming.popleft()
                requests = trial.count("asked")
                if _act(trial, process, moment):
                    ended_by = moment.what
        time.sleep(0.005)
    return ended_by


def _act(trial: Trial, process: BaseProcess, moment: Moment) -> bool:
    """Returns whether it is the end of the process."""
    what, *more = moment.what.split()
    if what in ("client", "tear"):
        process.kill()
    elif what == "stop":
        trial.store.stop_file.touch()
    else:
        victim = trial.server(more[0])
        trial.happened.append(f"{moment.what}: {victim.pid if victim else 'nobody there'}")
        with suppress(psutil.Error):
            if victim is not None:
                if more[0] == "keeper" and (life := _life(victim)):
                    trial.unkept.add(life)
                victim.send_signal(signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        return False
    trial.happened.append(moment.what)
    return True


def _accept_end(trial: Trial, script: Script, status: int, done: str) -> None:
    """Whether it may have ended like this; what somebody would do then is done."""
    said = trial.outcome
    what, *more = done.split() or [""]
    if status == -signal.SIGKILL and what in ("client", "tear"):
        if what == "client" or not trial.tear(more[0].replace("main", ""), float(more[1])):
            trial.note_kept()
        return
    trial.happened.append(f"ended with {status}: {said.get('words')}")
    assert status == 1 and said, "it broke"
    if said["error"] == "StoreError" and any(word in said["words"] for word in ("journal", "store")):
        if "is damaged" in said["words"]:
            assert trial.lost, said["words"]
            assert f"Move {trial.store.journal_path}" in said["words"]
            trial.move_journal_away()
            return
        assert script.plan.room, said["words"]
        script.plan.room = None
        script.plan.write(trial.folder)
        trial.note_kept()
        return
    if said["stopped"]:
        assert what == "stop"
        trial.note_kept()
        return
    raise AssertionError(f"it ended with {said['error']}: {said['words']} {said['accounting']}")
