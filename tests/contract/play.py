"""A run without Prefect, on a simulated server whose faults are chosen life by life."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from promptmill import events
from promptmill.errors import LaunchFailed, PromptmillError, ServerDied
from promptmill.generation.mill import Mill
from promptmill.lives import Steps, keep_served
from promptmill.model import Model, load_tokenizer
from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest
from promptmill.serving.facts import Facts
from promptmill.serving.keeper import LIFE_MARK
from promptmill.serving.remedies import Death, Verdict
from promptmill.serving.server import Lost, Server
from promptmill.serving.supervisor import Supervisor
from promptmill.settings import Profile
from promptmill.types import Answer, Manifest, Tally
from tests.contract.sglang_place import Engine

DEADLINE_S = 600.0
INACTIVITY_S = 2.0
STARTS_SIM = [sys.executable, "-m", "promptmill.sim"]
NO_TOKENIZER = {"tokenizer-path": "/none", "sim-vocab": 49152, "sim-eos-id": 2}
FLAGS = {
    "sim-gpu": "kimi-96gb",
    "sim-speed": 200,
    "sim-mean-output": 40,
    "mem-fraction-static": 0.88,
    **NO_TOKENIZER,
}
SETTINGS = [
    f"server.inactivity_timeout_s={INACTIVITY_S}",
    "server.startup_silence_timeout_s=2",
    "server.startup_timeout_s=120",
    "server.poll_interval_s=0.2",
    "server.max_in_flight=8",
    "server.stop_grace_s=5",
    "server.min_headroom_gib=0.5",
    "server.max_relaunches=50",
    "chat.reasoning_open=",
    "chat.reasoning_close=",
]


@dataclass(frozen=True)
class Row:
    """A fault, and what is to come of it."""

    fault: str
    signature: str
    """More than one where it depends on who sees it first."""
    action: str
    remedy: str
    """Words of the remedy that the table of lives shows; steps are in it."""
    cause: str
    """Words of the cause of death that it shows."""
    lives: int = 1
    """How many end like this before it gives up."""
    unseen: bool = False
    """In a container: the scheduler's process cannot be watched."""

    def __str__(self) -> str:
        return f"{self.fault} unseen" if self.unseen else self.fault


@dataclass
class Story:
    """What a run told and left behind."""

    folder: Path
    told: list[events.Event] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    lives: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    tally: Tally | None = None
    ended: Tally | PromptmillError | None = None
    failed: list[str] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    figures: events.Figures | None = None
    by_server: dict[str, int] = field(default_factory=dict)
    prompts: int = 0

    @property
    def counts(self) -> dict[str, int]:
        assert self.tally is not None
        return self.tally.to_json()

    def said(self, kind: type[events.Event]) -> list[str]:
        return [str(event) for event in self.told if isinstance(event, kind)]


class Play:
    """A run on a profile, its server's faults life by life."""

    def __init__(
        self,
        profile: Path,
        settings: Sequence[str] = (),
        rows: Sequence[Row] = (),
        meanwhile: Callable[[Mill], object] = lambda mill: None,
    ) -> None:
        """`meanwhile` is called again and again while it serves."""
        self.folder = profile.parent
        self.story = Story(self.folder)
        self.until = time.monotonic() + DEADLINE_S
        self._profile = load_profile(str(profile), [*SETTINGS, *settings])
        self._rows = rows
        self._fault: Row | None = None
        self._meanwhile = meanwhile

    def run(self, publish: bool = False) -> Story:
        story = self.story
        with events.listening(self._hear), Run.open(self._profile, RunRequest(), "faults") as run:
            manifest = prepare(run.preparation("A_text"))
            run.accept([manifest])
            try:
                self._generate(run, manifest)
            finally:
                story.keys = [key for one in run.servers._known.values() if (key := one.api_key)]
                story.lives = [life.to_row() for life in run.servers.lives]
                story.deaths = run.servers.deaths
            self._account(run, manifest)
            if publish:
                run.publish([manifest])
        self._check()
        return story

    def _hear(self, event: events.Event) -> None:
        if not isinstance(event, events.Figures):
            self.story.told.append(event)

    def _generate(self, run: Run, manifest: Manifest) -> None:
        with run.mill([manifest]) as mill:
            waiter = threading.Thread(target=self._wait_for_all, args=(mill,))
            waiter.start()
            try:
                longest = run.longest_request_tokens([manifest])
                steps = Steps(self._launch, self._gate, self._diagnose)
                for _ in keep_served(run.servers, mill, longest, steps, look_s=0.05):
                    assert time.monotonic() < self.until, "the run hangs"
                    self._meanwhile(mill)
                waiter.join(max(0.0, self.until - time.monotonic()))
                assert not waiter.is_alive(), "generate hangs"
                run.servers.note_answers(mill.answers_by_server())
                self.story.figures = mill.figures()
            finally:
                mill.close()
                waiter.join()

    def _wait_for_all(self, mill: Mill) -> None:
        while self.story.ended is None:
            try:
                self.story.ended = mill.generate("A_text")
            except ServerDied:
                continue
            except PromptmillError as error:
                self.story.ended = error

    def _launch(self, servers: Supervisor) -> list[Server]:
        life = len(servers.lives)
        self._fault = self._rows[life] if life < len(self._rows) else None
        fault = f"{self._fault.fault}\n" if self._fault else ""
        (self.folder / "faults").write_text(fault, encoding="utf-8")
        return servers.launch()

    def _gate(self, servers: Supervisor, server: Server, longest: int) -> Facts:
        facts = servers.pass_gate(server, longest)
        if self._fault and self._fault.unseen:
            server._schedulers.clear()
        return facts

    def _diagnose(self, servers: Supervisor, ended: Lost | LaunchFailed) -> Verdict:
        self.story.verdicts.append(servers.diagnose(ended))
        return replace(self.story.verdicts[-1], wait_s=0.0)

    def _account(self, run: Run, manifest: Manifest) -> None:
        story, store = self.story, run.store
        story.tally = run.tally([manifest])[0]
        story.prompts = manifest.prompts
        sealed = store._segments.keys(store._segments.names())
        hashes = [h for table in sealed for h in table.column("prompt_hash").to_pylist()]
        hashes += [key[0] for key in store._reader.keys()]  # noqa: SIM118  no dict
        assert len(hashes) == len(set(hashes)), "a prompt ended twice"
        story.answers = store.lookup(hashes)
        for answer in story.answers.values():
            story.by_server[answer.server] = story.by_server.get(answer.server, 0) + 1
        story.failed = [answer.error for answer in store.lookup(store.with_flag("failed")).values()]

    def _check(self) -> None:
        """What holds after every run, however it went."""
        counts = self.story.counts
        assert counts.pop("rows") == sum(counts.values()) == self.story.prompts
        for life in self.story.lives:
            check_words(life)
        assert not left_behind(life["server"] for life in self.story.lives)
        check_secrets(self.story)


def check_words(life: dict[str, Any]) -> None:
    """A line of the table that somebody reads at three in the morning."""
    cause, remedy = life["cause of death"], life["remedy"]
    assert "\n" not in cause + remedy
    assert len(cause) < 400 and not cause.endswith(".") and life["server"] not in cause
    assert "{" not in remedy and not remedy.endswith((".", ":"))


def left_behind(names: Any) -> list[str]:
    """Processes of these lives that are still there."""
    wanted, found = set(names), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            life = process.environ().get(LIFE_MARK, "").rpartition("-")[0]
            if life in wanted and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


def check_secrets(story: Story) -> None:
    """No key in what a run writes, says, or hands to whoever listens."""
    said = [str(story.ended), *map(repr, [*story.told, *story.deaths, *story.verdicts, *story.lives])]
    for path in story.folder.rglob("*"):
        if path.is_file():
            said.append(path.read_bytes().decode("latin-1"))
    for key in story.keys:
        assert len(key) > 8
        assert not any(key in text for text in said)


@contextmanager
def hurried() -> Iterator[None]:
    """What waits for people and for hardware does not, and a tokenizer is loaded once.

    Templates are compared in test_sglang.py.
    """
    loaded: dict[str, Any] = {}

    def load_once(profile: Profile, model: Model, folder: Path) -> Any:
        if model.path not in loaded:
            loaded[model.path] = load_tokenizer(profile, model, folder)
        return loaded[model.path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("promptmill.run.load_tokenizer", load_once)
        patch.setattr("promptmill.serving.sglang_gate.compare_rendering", lambda *_: None)
        patch.setattr("promptmill.generation.asking.RETRY_AFTER_S", (0.2, 1.0))
        patch.setattr("promptmill.generation.replica._DEATH_CONFIRMED_S", 0.3)
        patch.setattr("promptmill.generation.replica._BUSY_PAUSE_S", 0.2)
        patch.setattr("promptmill.generation.replica._STREAMS_END_S", 0.3)
        patch.setattr("promptmill.serving.liveness._REFUSED_S", 1.0)
        patch.setattr("promptmill.serving.supervisor._LOOK_AGAIN_S", 0.2)
        yield


def write_prompts(folder: Path, prompts: Sequence[str] | int) -> None:
    texts = [f"Tell me about {n}." for n in range(prompts)] if isinstance(prompts, int) else prompts
    lines = [json.dumps({"id": f"r{n}", "prompt": text}) for n, text in enumerate(texts)]
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def play(
    folder: Path,
    model: Path,
    prompts: Sequence[str] | int,
    rows: Sequence[Row] = (),
    settings: Sequence[str] = (),
    publish: bool = False,
    **flags: Any,
) -> Story:
    """One fault a life, in the order of `rows`; the life after them has none."""
    write_prompts(folder, prompts)
    profile = Engine(STARTS_SIM, model, flags=FLAGS).write_profile(
        folder, **{"sim-fault-file": str(folder / "faults")}, **flags
    )
    return Play(profile, settings, rows).run(publish)
