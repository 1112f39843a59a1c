"""Every fault of the simulator, acted out against the real supervisor and mill: what the manual promises.

The loop of flows/regenerate.py without Prefect. Where faults follow each other in one run, each life has one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from tokenizers import Tokenizer

from promptmill import events
from promptmill.errors import LaunchFailed
from promptmill.generation.mill import Mill
from promptmill.serving.remedies import Death, Verdict
from promptmill.types import Tally
from tests.contract.play import (
    NO_TOKENIZER,
    STARTS_SIM,
    Play,
    Row,
    Story,
    hurried,
    play,
    write_prompts,
)
from tests.contract.sglang_place import REAL, ROOT, Engine, sim_model
from tests.helpers_store import until

pytestmark = [
    pytest.mark.skipif(REAL, reason="the real SGLang acts out no faults"),
    pytest.mark.timeout(900),
]
ALL = bool(os.environ.get("ALL_FAULTS"))
slow = pytest.mark.skipif(not ALL, reason="ALL_FAULTS=1 acts out these too; others of their kind are")


# --- the stage


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def _hurry() -> Iterator[None]:
    with hurried():
        yield


def check_row(row: Row, death: Death, verdict: Verdict, life: dict[str, Any]) -> None:
    assert death.signature in row.signature.split("|")
    assert death.phase == ("start" if row.fault.startswith("start:") else "serving")
    assert verdict.action == row.action
    assert row.remedy in life["remedy"]
    assert row.cause in life["cause of death"]
    assert verdict.advice or verdict.action != "stop"


# --- faults that a run survives

STARTS = [
    Row("start:kv", "kv_budget", "step", "no room for the KV pool: mem-fraction-static 0.88 → 0.94",
        "its weights left no room for the KV pool"),
    Row("start:graph-oom", "gpu_oom", "step", "CUDA graphs: cuda-graph-max-bs-decode unset → 128",
        "CUDA out of memory while it captured CUDA graphs (0.50 GiB wanted, 0.42 GiB free)"),
    Row("start:dist-port", "port_wait", "wait", "one of its ports is not free yet; waiting 30 s first",
        "one of its inner ports was still taken"),
    Row("start:killed", "killed_in_init", "relaunch", "as it was",
        "killed while it loaded its weights, most likely for want of host memory"),
    Row("start:hang", "no_start_progress", "relaunch", "as it was", "its log has not grown for 2 s"),
]  # fmt: skip

if ALL:
    STARTS += [
        Row("start:warmup", "exception", "relaunch", "as it was", "an exception while it warmed up"),
        Row("start:unbalanced", "unbalanced", "wait", "relaunched: somebody else holds memory of these GPUs; "
            "waiting 30 s first", "some of its GPUs were in use by somebody else"),
        Row("start:host-memory", "host_memory", "wait", "memory does not suffice; waiting 30 s first",
            "Requesting 32.20 GB but only have 16.10 GB free"),
    ]  # fmt: skip

# Late enough in a life that the suspects of the one before have been tried.
DEATHS = [
    Row("die@answers=14", "zombie|child_killed", "relaunch", "as it was", "process"),
    Row("oom@answers=14", "gpu_oom", "step", "under load: mem-fraction-static 0.88 → 0.83",
        "CUDA out of memory under load (1.75 GiB wanted, 5.50 GiB free)"),
    Row("kv-oom@answers=14", "kv_slots", "step", "slots: schedule-conservativeness unset → 1.3",
        "it found no free KV slots for a batch"),
    Row("illegal@answers=14", "illegal_access", "relaunch", "as it was", "a CUDA kernel failed under load"),
    Row("illegal@answers=14", "illegal_access", "step",
        "a CUDA kernel failed again: disable-overlap-schedule unset → True", "a CUDA kernel failed"),
    Row("zombie@answers=14", "zombie", "relaunch", "as it was", "its scheduler process is gone"),
    Row("freeze@answers=14", "hang", "relaunch", "as it was", "no token for 2 s with 8 requests in flight"),
    Row("lost@answers=14", "lost_requests", "relaunch", "as it was", "and it says that it has none"),
]  # fmt: skip
if ALL:
    DEATHS += [
        Row("leak@answers=14", "memory_leak", "step", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE unset → 0",
            "its own check found a leak"),
        Row("nccl@answers=14", "nccl", "relaunch", "as it was",
            "(NCCL) under load: [Rank 0] Watchdog caught collective operation timeout"),
        Row("watchdog@answers=14", "watchdog", "relaunch", "as it was", "until its own watchdog ended it"),
        Row("die@answers=14", "child_killed", "relaunch", "as it was", "killed under load", unseen=True),
        Row("zombie@answers=14", "hang", "relaunch", "as it was", "no token for 2 s", unseen=True),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def starts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return play(tmp_path_factory.mktemp("starts"), model, 16, STARTS)


@pytest.fixture(scope="module")
def deaths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return play(tmp_path_factory.mktemp("deaths"), model, 22 * len(DEATHS), DEATHS, publish=True)


@pytest.mark.parametrize("n", range(len(STARTS)), ids=map(str, STARTS))
def test_fault_at_the_start_is_survived(starts: Story, n: int) -> None:
    check_row(STARTS[n], starts.deaths[n], starts.verdicts[n], starts.lives[n])
    assert starts.deaths[n].answers == starts.lives[n]["answers"] == 0


@pytest.mark.parametrize("n", range(len(DEATHS)), ids=map(str, DEATHS))
def test_fault_while_it_serves_is_survived(deaths: Story, n: int) -> None:
    check_row(DEATHS[n], deaths.deaths[n], deaths.verdicts[n], deaths.lives[n])
    assert deaths.lives[n]["answers"] == deaths.deaths[n].answers > 0


@pytest.mark.parametrize("name", ["starts", "deaths"])
def test_run_of_many_deaths_answers_every_prompt_once(name: str, request: pytest.FixtureRequest) -> None:
    story: Story = request.getfixturevalue(name)
    rows = {"starts": STARTS, "deaths": DEATHS}[name]
    assert isinstance(story.ended, Tally)
    assert len(story.deaths) == len(rows) == len(story.lives) - 1 == len(story.said(events.Relaunching))
    assert story.counts["pending"] == story.counts["failed"] == 0
    assert {life["server"]: life["answers"] for life in story.lives if life["answers"]} == story.by_server
    assert len(story.keys) == len(rows) + 1


# --- faults that end it

ENDS = [
    Row("start:oom", "gpu_oom", "stop", "gave up: the weights do not fit into the GPUs' memory",
        "CUDA out of memory while it loaded its weights (1.75 GiB wanted, 0.42 GiB free)"),
    Row("start:nccl", "nccl", "stop", "NCCL cannot start: mostly /dev/shm is too small",
        "unhandled system error"),
    Row("start:shm", "shm", "stop", "/dev/shm is full or too small", "/dev/shm/nccl-9oNLGt"),
    Row("start:shm:bus", "shm", "stop", "/dev/shm is full or too small", "(exit code: -7) (exit status 1)"),
    Row("start:disk", "disk_full", "stop", "a disk is full", "while it loaded its weights"),
    Row("start:import", "environment", "stop", "the server's environment is broken", "libcudart.so.13"),
    Row("start:bad-model", "bad_model", "stop", "the model cannot be used", "Repo id must be in the form"),
    Row("start:kv-dtype", "kv_dtype", "stop", "the KV dtype is not supported here", "only supports kv-cache"),
    Row("disk@answers=14", "disk_full", "stop", "a disk is full", "a disk was full under load"),
]  # fmt: skip
REPEATED = [
    Row("start:killed", "killed_in_init", "stop", "2 times in a row", "want of host memory", lives=2),
    Row("start:host-memory", "host_memory", "stop", "2 times in a row", "Not enough host memory", lives=2),
    Row("start:dist-port", "port_wait", "stop", "3 times in a row", "inner ports", lives=3),
    Row("start:unbalanced", "unbalanced", "stop", "3 times in a row", "by somebody else", lives=3),
    Row("start:warmup", "exception", "stop", "3 lives in a row ended the same way", "warmed up", lives=3),
    Row("start:hang", "no_start_progress", "stop", "the start stood still, 2 times", "not grown", lives=2),
]  # fmt: skip
QUICK = {"start:oom", "start:nccl", "start:bad-model", "start:killed", "disk@answers=14"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.fault, marks=() if row.fault in QUICK else slow) for row in (*ENDS, *REPEATED)],
)
def test_fault_that_nothing_helps_against_ends_the_run_with_advice(
    row: Row, model: Path, tmp_path: Path
) -> None:
    story = play(tmp_path, model, 24, [row] * (row.lives + 1))
    assert isinstance(story.ended, LaunchFailed)
    assert len(story.lives) == len(story.deaths) == row.lives
    check_row(row, story.deaths[-1], story.verdicts[-1], story.lives[-1])
    assert [verdict.wait_s for verdict in story.verdicts if verdict.action == "wait"] == [30.0, 60.0][
        : row.lives - 1 if story.verdicts[0].action == "wait" else 0
    ]
    assert len(story.said(events.GaveUp)) == 1
    words = str(story.ended)
    assert words.startswith(f"gave up on the server: {story.verdicts[-1].why}.")
    assert story.verdicts[-1].advice in words
    assert "To run it by hand: " in words and "Its log (" in words
    counts = story.counts
    assert 24 - counts["pending"] == sum(story.by_server.values())
    assert (counts["pending"] == 24) == row.fault.startswith("start:")
    assert counts["failed"] == 0


# --- what is no death


def test_slow_start_that_says_something_is_waited_for(model: Path, tmp_path: Path) -> None:
    """It takes longer than startup_silence_timeout_s, and is never silent for so long."""
    settings = ["server.startup_silence_timeout_s=1"]
    story = play(tmp_path, model, 8, [Row("start:slow-progress:300", "", "", "", "")], settings)
    assert story.counts["pending"] == story.counts["failed"] == 0
    assert len(story.lives) == 1
    assert story.lives[0]["startup_s"] > 1.5


TROUBLES = """
busy:2000@answers=8
full:200@answers=16
cut@answers=24
http500:3@answers=32
freeze:200@answers=40
"""
"""At speed 200: ten seconds in which /health finds nothing, one of 503s, and a freeze of one."""


def test_trouble_that_passes_ends_no_life_and_fails_no_prompt(model: Path, tmp_path: Path) -> None:
    story = play(tmp_path, model, 64, [Row(TROUBLES, "", "", "", "")])
    assert story.deaths == []
    assert story.counts["pending"] == story.counts["failed"] == 0
    assert story.lives[0]["answers"] == 64
    (log,) = (tmp_path / "store/servers").glob("*.log")
    assert '"POST /generate HTTP/1.1" 500' in log.read_text(encoding="utf-8")


@slow
def test_server_that_puts_everything_off_for_ever_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptmill.serving.liveness._PUT_OFF_PATIENCE", 1)
    row = Row(
        "full:100000@answers=8", "hang", "relaunch", "as it was", "it has put off every request for 2 s"
    )
    story = play(tmp_path, model, 24, [row])
    check_row(row, story.deaths[0], story.verdicts[0], story.lives[0])
    assert story.counts["pending"] == story.counts["failed"] == 0


def test_collapse_of_throughput_is_seen_and_relaunched(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with a retraction: the KV pool takes two long prompts at a time, and too many short ones."""
    monkeypatch.setattr("promptmill.serving.liveness._WINDOW_S", 1.0)
    row = Row("collapse", "collapse", "relaunch", "as it was", "throughput fell below a quarter of the ")
    settings = ["server.collapse_timeout_s=0.5", "classes.short.max_new_tokens=200"]
    flags = {"max-total-tokens": 1380, "schedule-conservativeness": 0.1, "sim-mean-output": 100_000}
    prompts = [f"{n}. " + "Tell me more. " * 110 for n in range(8)] + [f"{n}." for n in range(16)]
    story = play(tmp_path, model, prompts, [row], settings, **flags, **{"sim-speed": 10})
    check_row(row, story.deaths[0], story.verdicts[0], story.lives[0])
    assert story.counts["pending"] == story.counts["failed"] == 0


# --- prompts that are to blame, and those that are not


@pytest.fixture(scope="module")
def poison(model: Path) -> tuple[str, int]:
    """A word and the id that no other prompt here has."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    (token,) = tokenizer.encode(" zebra", add_special_tokens=False).ids
    return " zebra", token


@pytest.mark.parametrize(
    "fault", ["oom", pytest.param("freeze", marks=slow), pytest.param("die", marks=slow)]
)
def test_prompt_that_kills_the_server_is_quarantined_and_no_other_pays(
    fault: str, model: Path, tmp_path: Path, poison: tuple[str, int]
) -> None:
    word, token = poison
    prompts = [f"Tell me about {n}." for n in range(32)]
    prompts[5] += word
    row = Row(f"{fault}@token={token}", "", "", "", "")
    story = play(tmp_path, model, prompts, [row] * 9)
    assert len(story.deaths) == 3
    assert story.counts["failed"] == 1
    assert story.counts["pending"] == 0
    (told,) = story.said(events.Quarantined)
    assert "row r5 of A_text" in told
    assert story.failed[0].startswith("quarantined: alone without a token")
    assert story.verdicts[-1].action == "quarantine"
    assert "was alone at two deaths" in story.lives[-2]["remedy"]


@slow
def test_prompt_that_was_alone_at_one_death_by_chance_is_answered(
    model: Path, tmp_path: Path, poison: tuple[str, int]
) -> None:
    word, token = poison
    prompts = [f"Tell me about {n}." for n in range(24)]
    prompts[5] += word
    rows = [Row(f"die@token={token}", "", "", "", ""), Row(f"die@token={token}", "", "", "", "")]
    story = play(tmp_path, model, prompts, rows)
    assert len(story.deaths) == 2
    assert story.failed == []


def test_last_prompt_is_not_forgotten_when_its_server_is_lost(
    model: Path, tmp_path: Path, poison: tuple[str, int]
) -> None:
    word, token = poison
    story = play(tmp_path, model, [f"Tell me about a{word}."], [Row(f"lost@token={token}", "", "", "", "")])
    assert len(story.deaths) == 1
    assert story.counts["pending"] == 0


@slow
def test_requests_that_were_lost_twice_are_nobodys_fault(
    model: Path, tmp_path: Path, poison: tuple[str, int]
) -> None:
    word, token = poison
    prompts = [f"Tell me about {n}." for n in range(24)]
    prompts[7] += word
    faults = [f"lost@token={token}", "lost@answers=1"]  # the second one after the gate's own answer
    story = play(tmp_path, model, prompts, [Row(fault, "", "", "", "") for fault in faults])
    assert len(story.deaths) == 2
    assert story.failed == []


# --- servers that somebody else runs

KEY = "key-of-the-others-servers"
THEIRS = ["--device", "cpu", "--max-total-tokens", "8192", "--served-model-name", "theirs", "--api-key", KEY,
          "--sim-speed", "5", "--sim-mean-output", "100"]  # fmt: skip


class Theirs:
    """An SGLang that promptmill did not start, at one address for all its lives."""

    def __init__(self, folder: Path, model: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        tokenizer = [part for flag, value in NO_TOKENIZER.items() for part in (f"--{flag}", str(value))]
        command = [*STARTS_SIM, "--model-path", str(model), "--port", str(self.port), *THEIRS, *tokenizer]
        self._pids = folder / f"{self.port}.pids"
        # A shell is its restart command, too: in a session of its own, and its pid is written down.
        run = f"cd {ROOT}; setsid {shlex.join(command)} >/dev/null 2>&1 & echo $! >> {self._pids}"
        self.start_command = ["sh", "-c", run]

    def start(self) -> None:
        subprocess.run(self.start_command, check=True, timeout=20)

    def until_ready(self) -> None:
        def answers() -> bool:
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health", trust_env=False).status_code == 200
            return False

        until(answers, 20, "it is healthy")

    def end(self) -> None:
        for line in self._pids.read_text().split() if self._pids.exists() else ():
            with suppress(ProcessLookupError):
                os.killpg(int(line), signal.SIGKILL)
        self._pids.unlink(missing_ok=True)


@contextmanager
def theirs(folder: Path, model: Path, n: int) -> Iterator[list[Theirs]]:
    servers = [Theirs(folder, model) for _ in range(n)]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.end)
            server.start()
        for server in servers:
            server.until_ready()
        yield servers


def attach(
    folder: Path,
    model: Path,
    urls: list[str],
    prompts: int,
    meanwhile: Callable[[Mill], object],
    *settings: str,
) -> Story:
    write_prompts(folder, prompts)
    profile = Engine(STARTS_SIM, model).write_profile(folder)
    settings = (f"server.urls={json.dumps(urls)}", "server.api_key_env=THEIR_KEY", *settings)
    return Play(profile, settings, meanwhile=meanwhile).run()


def once(done: int, action: Callable[[], None]) -> Callable[[Mill], None]:
    """`action` when so many prompts are done."""
    waiting = [action]

    def look(mill: Mill) -> None:
        if waiting and mill.done() >= done:
            waiting.pop()()

    return look


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is none of the run's, for what holds a key."""
    monkeypatch.setenv("THEIR_KEY", KEY)
    folder = tmp_path / "others"
    folder.mkdir()
    return folder


def test_servers_that_go_away_cost_no_prompt_and_are_asked_back(
    model: Path, tmp_path_factory: pytest.TempPathFactory, others: Path
) -> None:
    """The first is asked back while the second serves; the second cannot be, and the first goes on alone."""
    with theirs(others, model, 2) as (a, b):
        script = others / "restart.sh"
        restart = shlex.quote(a.start_command[2])
        script.write_text(f'[ "$1" = {a.url} ] || {{ echo no such host >&2; exit 7; }}\nsh -c {restart}\n')
        first, second = once(10, a.end), once(60, b.end)
        story = attach(
            tmp_path_factory.mktemp("run"),
            model,
            [a.url, b.url],
            120,
            lambda mill: (first(mill), second(mill) if len(mill.answers_by_server()) > 1 else None),
            f"server.restart_command={json.dumps(['sh', str(script), '{url}'])}",
        )
    assert story.counts["pending"] == story.counts["failed"] == 0
    refused = "its address has refused connections for 1 s"
    assert story.said(events.Died) == [f"SERVER DIED: {one.url}: {refused}" for one in (a, b)]
    assert story.deaths == [], "while another serves there is nothing to decide"
    first_a, first_b, second_a, *_ = story.lives
    assert [life["server"] for life in (first_a, first_b, second_a)] == [a.url, b.url, a.url]
    assert first_a["cause of death"] == first_b["cause of death"] == refused
    assert first_a["remedy"] == "the others go on without it"
    assert second_a["cause of death"] == ""
    assert first_a["answers"] + second_a["answers"] == story.by_server[a.url]
    assert first_b["answers"] == story.by_server[b.url]
    failed = {life["server"]: life["cause of death"] for life in story.lives[3:]}
    assert failed == {b.url: "server.restart_command failed: status 7: no such host"}


def test_server_that_is_away_at_the_start_does_not_keep_the_other_waiting(
    model: Path, tmp_path_factory: pytest.TempPathFactory, others: Path
) -> None:
    with theirs(others, model, 2) as (a, b):
        a.end()
        came = once(20, a.start)
        urls = [a.url, b.url]
        story = attach(tmp_path_factory.mktemp("run"), model, urls, 120, came)
    assert story.counts["pending"] == story.counts["failed"] == 0
    assert [life["server"] for life in story.lives] == [b.url, a.url]
    assert min(life["answers"] for life in story.lives) > 0


class Completions:
    """An OpenAI-compatible server that gives ids, at one port for all its lives, in a thread of its own."""

    def __init__(self) -> None:
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Completions:
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def end(self) -> None:
        """Connections break, and new ones are refused."""
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
            self._runner = None

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        prompt = (await request.json())["prompt"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for n in range(12):
            reason = "stop" if n == 11 else None
            choice = {"index": 0, "text": "x", "finish_reason": reason, "token_ids": [500 + n]}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": n, "total_tokens": 0}
            event = {"choices": [choice], "usage": usage if reason else None}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.02)  # a token's time
        await response.write(b"data: [DONE]\n\n")
        return response


def test_completions_server_that_goes_away_and_comes_back_fails_no_prompt(
    model: Path, tmp_path_factory: pytest.TempPathFactory, others: Path
) -> None:
    with Completions() as server:

        def back(event: events.Event) -> None:
            if isinstance(event, events.Relaunching):
                server.start()

        with events.listening(back):
            story = attach(
                tmp_path_factory.mktemp("run"),
                model,
                [f"http://127.0.0.1:{server.port}/v1"],
                60,
                once(10, server.end),
                "server.engine=openai",
            )
        assert story.counts["answered"] == 60
        (death,) = story.deaths
        assert (death.signature, death.phase) == ("refused", "serving")
        assert story.verdicts[0].action == "wait"
        assert len(story.lives) == 2
