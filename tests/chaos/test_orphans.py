"""No orphans, ever: a real `promptmill run` on the simulator, killed with -9 at random moments, or ended.

Three moments by default. `CHAOS_ROUNDS=20 python -m pytest tests/chaos/test_orphans.py -s` goes through all
of them and shows what was hit; CHAOS_SEED repeats the choices of a run.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from promptmill.serving.process import end_leftovers
from promptmill.store.journal import JournalReader
from tests.chaos.containers import client, inside
from tests.contract.sglang_place import sim_model
from tests.flow.place import ROOT, Place

ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "0"))
SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(1_000_000))
GONE_S = 10.0
REACHED_S = 120.0

# Everything takes long enough to be hit: 2 s to load, 10 s and more to answer.
SIMULATOR = [sys.executable, "-m", "promptmill.sim", "--sim-speed", "5", "--sim-start-s", "10"]
SIMULATOR += ["--sim-mean-output", "60", "--sim-mean-reasoning", "20"]
PROFILE = """
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
model_path = "{model}"
[server]
engine = "sglang"
version = "0.5.23"
command = {command}
cleanup = {cleanup}
max_in_flight = 4
gpu_wait_s = 0
[server.flags]
device = "cpu"
tp-size = 2
max-total-tokens = 8192
mem-fraction-static = 0.1
[chat]
template = "{root}/deployments/demo/chat_template.jinja"
[classes.short]
max_new_tokens = 64
[store]
url = "data/store"
[release]
url = "data/release"
[[partitions]]
name = "A_text"
source = "a.jsonl"
"""


@dataclass
class Flow:
    """A run in its place, and where its traces are."""

    place: Place
    process: subprocess.Popen[bytes]
    seen: list[psutil.Process] = field(default_factory=list)
    """Whatever was below it when it was last looked at, marked or not."""

    @property
    def servers(self) -> Path:
        return self.place.folder / "data/store/servers"

    def told(self) -> str:
        return (self.place.folder / "run.log").read_text(encoding="utf-8")

    def logged(self) -> str:
        """What the servers printed, life after life."""
        logs = sorted(self.servers.glob("promptmill-*.log"), key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)

    def answers(self) -> int:
        journal = self.place.folder / "data/store/journal.sqlite"
        return len(list(JournalReader(journal).answers("A_text"))) if journal.exists() else 0

    def wait_for(self, reached: Callable[[Flow], bool], what: str) -> None:
        deadline = time.monotonic() + REACHED_S
        while not reached(self):
            assert self.process.poll() is None, f"over before: {what}\n{self.told()}"
            assert time.monotonic() < deadline, f"not within {REACHED_S} s: {what}\n{self.told()}"
            time.sleep(0.002)

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.seen += psutil.Process(self.process.pid).children(recursive=True)

    def ports(self) -> set[int]:
        """On which something of ours may have listened."""
        found = re.findall(r"'port': (\d+)", self.logged())
        for process in self.seen:
            with suppress(psutil.Error):
                found += re.findall(r"--port (\d+)", " ".join(process.cmdline()))
        return set(map(int, found))

    def alive(self) -> list[psutil.Process]:
        return [*self.place.processes(), *(process for process in self.seen if lives(process))]

    def traces(self) -> list[str]:
        """Files that are there for a life alone."""
        return [path.name for path in self.servers.glob("*") if path.suffix != ".log"]


@dataclass(frozen=True)
class Moment:
    """When to kill: something that can be seen, and then up to `delay_s`."""

    reached: Callable[[Flow], bool]
    delay_s: float
    fault: str = ""
    stop: bool = False
    """After `promptmill stop`."""


MOMENTS = {
    "just started": Moment(lambda flow: True, 6),
    "its Prefect API starts": Moment(lambda flow: (flow.servers / "prefect-api.log").exists(), 3),
    "a key is written": Moment(lambda flow: any(flow.servers.glob("*.yaml")), 0.03),
    "a server starts": Moment(lambda flow: "launching server" in flow.told(), 0.5),
    "a server loads": Moment(lambda flow: "Load weight begin" in flow.logged(), 2),
    "the gate": Moment(lambda flow: "fired up" in flow.logged(), 1),
    "serving": Moment(lambda flow: flow.answers() >= 3, 2),
    "a crash is diagnosed": Moment(lambda flow: "SERVER DIED" in flow.told(), 0.5, "die@answers=6"),
    "relaunched": Moment(lambda flow: flow.told().count("launching server") > 1, 3, "die@answers=6"),
    "draining": Moment(lambda flow: "stopping: " in flow.told(), 0.5, stop=True),
    "a server is stopped": Moment(lambda flow: "SIGTERM received" in flow.logged(), 0.5, stop=True),
    "publishing": Moment(lambda flow: any(flow.servers.parents[1].glob("release/.staging-*")), 3),
}
QUICK = ["just started", "its Prefect API starts", "a crash is diagnosed"]


def chosen() -> list[str]:
    """The moment of every round: each of them comes up before one comes again."""
    rng = random.Random(SEED)
    names: list[str] = [] if ROUNDS else QUICK
    while len(names) < ROUNDS:
        names += rng.sample(list(MOMENTS), len(MOMENTS))
    return names[: ROUNDS or None]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Start = Callable[..., Flow]


@pytest.fixture
def start(place: Place) -> Iterator[Start]:
    """Starts a run of 40 prompts. Its servers' command and cleanup may be others."""
    started: list[Flow] = []

    def start_one(fault: str = "", command: list[str] | None = None, cleanup: Iterable[str] = ()) -> Flow:
        command = command or SIMULATOR
        if fault:
            command = [*command, "--sim-fault", f"{fault},lives=1", "--sim-state-dir", str(place.folder)]
        text = PROFILE.format(
            model=sim_model(place.folder),
            command=json.dumps(command),
            cleanup=json.dumps(list(cleanup)),
            root=ROOT,
        )
        (place.folder / "chaos.toml").write_text(text, encoding="utf-8")
        rows = "".join(json.dumps({"prompt": f"{n}. Say what this means."}) + "\n" for n in range(40))
        (place.folder / "a.jsonl").write_text(rows, encoding="utf-8")
        started.append(Flow(place, place.start("promptmill", "run", "chaos.toml", log="run.log")))
        return started[-1]

    yield start_one
    for flow in started:
        flow.process.kill()
        flow.process.wait()


def kill_at(flow: Flow, moment: Moment, rng: random.Random) -> str:
    """SIGKILL to the flow's process at that moment; returns the words under which it can be told."""
    if moment.stop:
        flow.wait_for(MOMENTS["serving"].reached, "serving")
        ask_to_stop(flow)
    flow.wait_for(moment.reached, "the moment")
    delay_s = rng.uniform(0, moment.delay_s)
    with pytest.raises(subprocess.TimeoutExpired):
        flow.process.wait(delay_s)
    flow.look()
    flow.process.kill()
    flow.process.wait()
    last = (flow.told().splitlines() or ["nothing told yet"])[-1]
    return f"{delay_s:.2f} s later, {len(flow.seen)} processes below; {last[:90]}"


def assert_nothing_left(flow: Flow, timeout_s: float) -> float:
    """Neither a process nor a key nor a port; returns the seconds that it took."""
    began = time.monotonic()
    while alive := flow.alive():
        if time.monotonic() - began >= timeout_s:
            break
        time.sleep(0.01)
    took_s = time.monotonic() - began
    told = [f"{process.pid} {process.cmdline()[:4]}" for process in alive if lives(process)]
    assert told == [], flow.told()
    assert flow.traces() == []
    assert end_leftovers(flow.servers) == []
    for port in flow.ports():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0, f"something listens on {port}"
    return took_s


@pytest.mark.parametrize(("number", "name"), list(enumerate(chosen())))
def test_flow_killed_at_any_moment_leaves_nothing_behind(number: int, name: str, start: Start) -> None:
    rng = random.Random(f"{SEED} {number}")
    moment = MOMENTS[name]
    flow = start(moment.fault)
    hit = kill_at(flow, moment, rng)
    took_s = assert_nothing_left(flow, GONE_S)
    print(f"\nCHAOS_SEED={SEED} {number}: {name}, {hit}: gone in {took_s:.2f} s")


def ask_to_stop(flow: Flow) -> None:
    assert flow.place.run("promptmill", "stop", "chaos.toml").returncode == 0


ENDINGS: dict[str, tuple[Callable[[Flow], None], int, float]] = {
    "by itself": (lambda flow: None, 0, 0),
    "by promptmill stop": (ask_to_stop, 3, 0),
    "by SIGINT": (lambda flow: flow.process.send_signal(signal.SIGINT), 130, 0),
    "by SIGTERM": (lambda flow: flow.process.send_signal(signal.SIGTERM), 130, 0),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_flow_that_ends_leaves_nothing_behind(how: str, start: Start) -> None:
    end, status, gone_s = ENDINGS[how]
    flow = start()
    flow.wait_for(MOMENTS["serving"].reached, "serving")
    flow.look()
    end(flow)
    assert flow.process.wait(REACHED_S) == status, flow.told()
    took_s = assert_nothing_left(flow, gone_s)
    print(f"\nended {how}: gone in {took_s:.2f} s")


IN_CONTAINER = ["serving"]
if ROUNDS:
    IN_CONTAINER += ["a key is written", "a server starts", "a server loads", "the gate"]
    IN_CONTAINER += ["a crash is diagnosed", "relaunched", "draining"]


@pytest.mark.parametrize("name", IN_CONTAINER)
def test_flow_killed_leaves_no_container_behind(name: str, start: Start, docker: Path) -> None:
    moment = MOMENTS[name]
    command = client(docker, "run", "{name}", *SIMULATOR)
    flow = start(moment.fault, command, client(docker, "rm", "{name}"))
    hit = kill_at(flow, moment, random.Random(f"{SEED} {name}"))
    flow.seen += inside(docker)
    took_s = assert_nothing_left(flow, GONE_S)
    assert inside(docker) == []
    print(f"\nCHAOS_SEED={SEED} container: {name}, {hit}: gone in {took_s:.2f} s")
