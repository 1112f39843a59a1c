"""A whole run without Prefect, in a process of its own that may be ended in any way.

Beside the profile: `durable`, a line an answer: when its commit was over, its hash and status;
`outcome.json`, how this process ended.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from promptmill import events
from promptmill.errors import LaunchFailed, PromptmillError, ServerDied
from promptmill.generation.mill import Mill
from promptmill.lives import Steps, keep_served
from promptmill.model import Model, load_tokenizer
from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest
from promptmill.serving.remedies import Verdict
from promptmill.serving.server import Lost
from promptmill.serving.supervisor import Supervisor
from promptmill.settings import Profile
from promptmill.store.journal import Journal, Waiter
from promptmill.types import Answer, Manifest
from tests.chaos.rogue import Plan
from tests.contract.play import hurried

LIMIT_S = 900.0
QUICK = {"promptmill.generation.loop._FLUSH_S": 0.3, "promptmill.generation.loop._TICK_S": 0.1}
"""For runs that are over in seconds."""


@dataclass(frozen=True)
class Durable:
    at: float
    prompt_hash: str
    status: str


def durable(folder: Path) -> list[Durable]:
    """What was told to be durable so far, in order."""
    try:
        lines = (folder / "durable").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    fields = [line.split() for line in lines]
    return [Durable(float(at), prompt_hash, status) for at, prompt_hash, status in fields]


MODEL = "CHAOS_MODEL"
_loaded: dict[str, Any] = {}


def preload() -> None:
    """Before processes are forked: what takes a run seconds."""
    pa.array([{}])  # imports pandas, where it is installed
    if path := os.environ.get(MODEL):
        _loaded[path] = AutoTokenizer.from_pretrained(path)


def run_in_child(path: str, settings: list[str], env: dict[str, str]) -> None:
    """The body of a process; everything that it starts inherits `env`."""
    os.environ.update(env)
    with (Path(path).parent / "run.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.exit(run(path, settings))


def run(path: str, settings: Sequence[str]) -> int:
    """Returns the exit status, 0 where everything is answered and published."""
    folder = Path(path).parent
    small = SmallRun(folder, settings)
    error: PromptmillError | None = None
    try:
        small.run(path)
    except PromptmillError as raised:
        error = raised
    outcome = {
        "error": type(error).__name__ if error else "",
        "words": str(error) if error else "",
        "stopped": small.stopped,
        "told": small.told,
        "deaths": small.deaths,
        "figures": small.figures,
        "accounting": small.accounting,
    }
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (folder / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
    return 1 if error or small.stopped or small.failed else 0


class SmallRun:
    """What flows/regenerate.py does, in threads."""

    def __init__(self, folder: Path, settings: Sequence[str]) -> None:
        self.folder = folder
        self.told: list[str] = []
        self.deaths = 0
        self.stopped = ""
        self.failed = 0
        self.figures: dict[str, Any] = {}
        self.accounting: dict[str, Any] = {}
        self._settings = list(settings)
        self._plan = Plan.read(folder)
        self._until = time.monotonic() + LIMIT_S

    def run(self, path: str) -> None:
        with hurried(), pytest.MonkeyPatch.context() as patch, events.listening(self._hear):
            # Nothing but time: these runs are over in seconds, and load_dataset is tested elsewhere.
            patch.setattr("promptmill.release.dataset.read_back", lambda *_: None)
            for name, value in (QUICK if os.environ.get("CHAOS_QUICK") else {}).items():
                patch.setattr(name, value)
            patch.setattr("promptmill.run.load_tokenizer", _load_tokenizer)
            self._keep_books(patch)
            profile = load_profile(path, self._settings)
            with Run.open(profile, RunRequest(), "chaos") as run:
                manifests = [prepare(run.preparation(name)) for name in run.partitions]
                run.accept(manifests)
                self._generate(run, manifests)
                tallies = run.tally(manifests)
                self.accounting = {tally.partition: tally.to_json() for tally in tallies}
                self.failed = sum(tally.counts["failed"] for tally in tallies)
                if not self.stopped:
                    run.publish(manifests)

    def _hear(self, event: events.Event) -> None:
        if not isinstance(event, events.Figures):
            self.told.append(str(event))

    def _keep_books(self, patch: pytest.MonkeyPatch) -> None:
        put_for = Journal.put_for
        book = os.open(self.folder / "durable", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        answers = 0

        def put_and_tell(
            journal: Journal, waiter: Waiter, answer: Answer, written: Callable[[], None]
        ) -> None:
            nonlocal answers
            answers += 1
            if self._plan.room and answers == self._plan.room[0]:
                self._fill_disk(journal.path)

            def tell() -> None:
                written()
                os.write(book, f"{time.monotonic()} {answer.prompt_hash} {answer.status}\n".encode())

            put_for(journal, waiter, answer, tell)

        patch.setattr(Journal, "put_for", put_and_tell)

    def _fill_disk(self, journal: Path) -> None:
        assert self._plan.room is not None
        wal = journal.with_name(journal.name + "-wal")
        room = (wal.stat().st_size if wal.exists() else 0) + self._plan.room[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))

    def _generate(self, run: Run, manifests: list[Manifest]) -> None:
        ends: list[PromptmillError] = []
        with run.mill(manifests) as mill:
            waiters = [
                threading.Thread(target=_wait_for, args=(mill, manifest.partition, ends))
                for manifest in manifests
            ]
            for waiter in waiters:
                waiter.start()
            try:
                longest = run.longest_request_tokens(manifests)
                for _ in keep_served(run.servers, mill, longest, Steps(diagnose=_at_once), look_s=0.05):
                    assert time.monotonic() < self._until, "the run hangs"
                for waiter in waiters:
                    waiter.join(max(0.0, self._until - time.monotonic()))
                    assert not waiter.is_alive(), "generate hangs"
                run.servers.note_answers(mill.answers_by_server())
                figures = mill.figures()
                self.figures = {
                    "resumed_tokens": figures.resumed_tokens,
                    "refilled_tokens": figures.refilled_tokens,
                }
                self.stopped = mill.stopping
                self.deaths = len(run.servers.deaths)
            finally:
                mill.close()
                for waiter in waiters:
                    waiter.join()
        if ends:
            raise ends[0]


def _at_once(servers: Supervisor, ended: Lost | LaunchFailed) -> Verdict:
    """A relaunch is not waited for."""
    return replace(servers.diagnose(ended), wait_s=0.0)


def _load_tokenizer(profile: Profile, model: Model, folder: Path) -> Any:
    return _loaded.get(model.path) or load_tokenizer(profile, model, folder)


def _wait_for(mill: Mill, partition: str, ends: list[PromptmillError]) -> None:
    while True:
        try:
            mill.generate(partition)
        except ServerDied:
            continue
        except PromptmillError as error:
            ends.append(error)
        return
