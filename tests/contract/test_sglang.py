"""What promptmill relies on in SGLang, on the simulator and on the real server."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from promptmill.errors import ConfigError, LaunchFailed, PromptRejected, ServerBusy
from promptmill.serving.client import ConnectionBroke, Request
from promptmill.serving.engines import make_client
from promptmill.serving.liveness import Loss
from promptmill.serving.logs import read_log
from promptmill.serving.server import Lost, Server
from promptmill.serving.sglang_client import SGLangClient, body_error
from promptmill.settings import SamplingSettings
from tests.contract.sglang_place import Engine, Running, find_engine, make_supervisor, running
from tests.helpers_store import until

pytestmark = pytest.mark.timeout(900)
T = TypeVar("T")
GREEDY = SamplingSettings(temperature=0.0)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    found = find_engine(tmp_path_factory.mktemp("engine"))
    if found is None:
        pytest.skip("the real SGLang is not built: make test-sglang")
    return found


@pytest.fixture(scope="module")
def live(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for all tests that leave it as it was."""
    with running(engine.write_profile(tmp_path_factory.mktemp("live"))) as server:
        yield server


def ask(live: Running, work: Callable[[SGLangClient], Awaitable[T]]) -> T:
    """Run `work` with a client of the server, in a loop of its own."""

    async def main() -> T:
        profile, server = live.profile, live.server
        model = live.supervisor._model
        client = make_client(profile, server, live.facts.served_model_name, model, live.renderer)
        assert isinstance(client, SGLangClient)
        try:
            return await asyncio.wait_for(work(client), WAIT_S)
        finally:
            await client.close()

    return asyncio.run(main())


def generate(live: Running, ids: list[int], rid: str = "", **sampling: Any) -> Any:
    """A plain POST /generate, unstreamed."""
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"temperature": 0, **sampling}}
    if rid:
        body["rid"] = rid
    with live.http() as http:
        return http.post("/generate", json=body)


class Background:
    """A plain request in a thread of its own, awaited at the end."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self.response: Any = None
        self._thread = threading.Thread(target=self._run, args=args, kwargs=more)
        self._thread.start()

    def _run(self, *args: Any, **more: Any) -> None:
        self.response = generate(*args, **more)

    def wait(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.response


def abort_all(live: Running) -> None:
    with live.http() as http:
        assert http.post("/abort_request", json={"abort_all": True}).status_code == 200


def running_requests(live: Running) -> int:
    with live.http() as http:
        return sum(rank["num_running_reqs"] for rank in http.get("/v1/loads").json()["loads"])


# --- launch and gate


def test_gate_lets_it_through_with_its_facts(live: Running) -> None:
    facts = live.facts
    assert facts.served_model_name == live.server.name
    assert facts.version == "0.5.23"
    assert facts.kv_tokens == 8192
    assert facts.context_tokens == 2046
    assert facts.kv_dtype in ("bfloat16", "float32")
    assert facts.headroom_gib is None  # no GPU
    assert facts.slots and facts.slots > 8
    assert facts.canary


def test_log_tells_the_same_facts(live: Running) -> None:
    assert live.server.process is not None
    digest = read_log(live.server.process.log)
    assert digest.phase == "serving"
    assert digest.facts.ready
    assert digest.facts.kv_tokens == 8192
    assert digest.facts.context_tokens == 2048


def test_key_is_asked_for_and_stands_neither_in_argv_nor_in_the_log(live: Running) -> None:
    import httpx

    key = live.server.api_key
    assert httpx.get(f"{live.server.url}/model_info", trust_env=False).status_code == 401
    assert live.server.process is not None
    process = psutil.Process(live.server.process.pid)
    for one in (process, *process.children(recursive=True)):
        assert not any(key in part for part in one.cmdline())
    assert "server_args" in live.log
    assert key not in live.log
    (config,) = live.server.process.log.parent.glob("*.yaml")
    assert config.stat().st_mode & 0o777 == 0o600


def test_schedulers_are_seen(live: Running) -> None:
    assert live.server._schedulers
    assert not live.server.scheduler_lost()


def test_taken_port_is_named_before_anything_is_started(engine: Engine, tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        _, supervisor, _ = make_supervisor(engine.write_profile(tmp_path), f"server.port={port}")
        with pytest.raises(ConfigError, match=str(port)):
            supervisor.launch()
        assert supervisor.lives == []


def test_port_taken_while_it_starts_is_no_server_of_ours(
    engine: Engine, live: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It greets the stranger that has its port, calls itself ready, and ends: the gate is not fooled."""
    monkeypatch.setattr("promptmill.serving.server.choose_port", lambda wanted: live.server.port)
    monkeypatch.setattr("promptmill.serving.server.wait_port_free", lambda port: True)
    _, supervisor, _ = make_supervisor(engine.write_profile(tmp_path))
    try:
        (server,) = supervisor.launch()
        with pytest.raises(LaunchFailed) as refused:
            supervisor.pass_gate(server, 128)
        assert refused.value.signature == "wrong_server" or "address already in use" in str(refused.value)
    finally:
        supervisor.stop_all()
    assert generate(live, live.ids("still there?"), max_new_tokens=1).status_code == 200


# --- one request


def test_generate_streams_what_the_unstreamed_call_returns(live: Running) -> None:
    ids = live.ids("What is the capital of France?")
    groups: list[list[int]] = []

    async def work(client: SGLangClient) -> Any:
        return await client.complete(Request(ids, GREEDY, 70, key="ab" * 32), groups.append)

    streamed = ask(live, work)
    plain = generate(live, ids, max_new_tokens=70).json()
    assert plain["meta_info"]["prompt_tokens"] == streamed.prompt_tokens == len(ids)
    assert plain["meta_info"]["finish_reason"]["type"] == streamed.finish_reason
    assert plain["output_ids"] == streamed.output_ids
    assert plain["meta_info"]["completion_tokens"] == len(streamed.output_ids)
    assert [token for group in groups for token in group] == streamed.output_ids
    assert len(groups[0]) == 1
    assert all(len(group) <= 32 for group in groups)


@pytest.mark.parametrize("kept", [1, 20, 41])
def test_answer_goes_on_from_its_own_tokens(kept: int, live: Running) -> None:
    """Ids are joined; in float32 (and in the simulator) the whole is what one request gives."""
    ids = live.ids("What is the capital of France?")

    async def work(client: SGLangClient) -> tuple[list[int], list[int]]:
        whole = (await client.complete(Request(ids, GREEDY, 64))).output_ids
        rest = (await client.complete(Request([*ids, *whole[:kept]], GREEDY, 64 - kept))).output_ids
        return whole, [*whole[:kept], *rest]

    whole, joined = ask(live, work)
    assert joined == whole


def test_whole_answer_is_the_streamed_one_and_comes_in_one_group(live: Running) -> None:
    ids = live.ids("What is the capital of France?")
    groups: list[list[int]] = []
    on_trial: list[list[int]] = []

    async def work(streaming: SGLangClient) -> Any:
        whole = SGLangClient(live.server.url, live.server.api_key, 49152, 32, WAIT_S, stream=False)
        try:
            answers = [await client.complete(Request(ids, GREEDY, 70)) for client in (streaming, whole)]
            await whole.complete(Request(ids, GREEDY, 70), groups.append)
            await whole.complete(Request(ids, GREEDY, 70, on_trial=True), on_trial.append)
            with pytest.raises(PromptRejected, match="longer than the model's context length"):
                await whole.complete(Request([7] * 3000, GREEDY, 4))
        finally:
            await whole.close()
        return answers

    streamed, answer = ask(live, work)
    assert answer == streamed
    assert groups == [answer.output_ids]
    assert len(on_trial[0]) == 1, "whoever tries a suspect waits for its first token alone"
    assert [token for group in on_trial for token in group] == answer.output_ids


def test_cut_at_the_cap_is_a_length(live: Running) -> None:
    async def work(client: SGLangClient) -> Any:
        return await client.complete(Request(live.ids("Count to one hundred."), GREEDY, 5))

    completion = ask(live, work)
    assert completion.finish_reason == "length"
    assert len(completion.output_ids) == 5


def test_answer_near_the_contexts_end_is_clipped_by_the_server(live: Running) -> None:
    room = live.facts.context_tokens
    assert room
    response = generate(live, [7] * (room - 6), max_new_tokens=7, ignore_eos=True)
    assert len(response.json()["output_ids"]) == 6


@pytest.mark.parametrize("bad", [-1, 49152, 10**6])
def test_id_that_would_kill_the_server_is_refused_before_it_is_sent(live: Running, bad: int) -> None:
    async def work(client: SGLangClient) -> Any:
        return await client.complete(Request([1, bad, 2], GREEDY, 4))

    with pytest.raises(PromptRejected, match="id_out_of_vocabulary"):
        ask(live, work)
    assert generate(live, [1, 2], max_new_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "words"),
    [([7] * 3000, 4, "longer than the model's context length"), ([7] * 2000, 100, "maximum context length")],
)
def test_too_long_is_the_rows_fault(live: Running, ids: list[int], max_new_tokens: int, words: str) -> None:
    async def work(client: SGLangClient) -> Any:
        return await client.complete(Request(ids, GREEDY, max_new_tokens))

    with pytest.raises(PromptRejected, match=words):
        ask(live, work)


def test_unknown_sampling_key_is_refused_by_name(live: Running) -> None:
    response = generate(live, [1, 2], max_new_tokens=3, nonsense=1)
    assert response.status_code == 400
    assert response.json()["error"].startswith("unknown field `nonsense`, expected one of `max_new_tokens`")
    error = body_error(response.status_code, response.content)
    assert isinstance(error, PromptRejected)
    assert "nonsense" in str(error)


def test_value_out_of_range_is_refused_by_name(live: Running) -> None:
    response = generate(live, [1, 2], max_new_tokens=3, temperature=-1)
    assert response.status_code == 400
    assert "temperature must be" in response.json()["error"]["message"]


def test_duplicate_request_id_is_not_the_rows_fault(live: Running) -> None:
    first = Background(live, [1, 2, 300], rid="twice", max_new_tokens=1500, ignore_eos=True)
    until(lambda: running_requests(live) > 0, WAIT_S, "the first one runs")
    second = generate(live, [1, 2, 300], rid="twice", max_new_tokens=3)
    with live.http() as http:
        http.post("/abort_request", json={"rid": "twice"})
    first.wait()
    assert second.status_code == 400
    assert second.json() == {"error": {"message": "Duplicate request ID detected: twice"}}
    assert isinstance(body_error(second.status_code, second.content), ServerBusy)


def test_abort_returns_what_there_is_and_is_no_answer(live: Running) -> None:
    async def work(client: SGLangClient) -> Any:
        first = asyncio.Event()
        request = asyncio.create_task(
            client.complete(Request([1, 2, 300], GREEDY, 1500), lambda ids: first.set())
        )
        await first.wait()
        await asyncio.to_thread(abort_all, live)
        await request

    with pytest.raises(ServerBusy, match="aborted"):
        ask(live, work)


def test_abort_is_by_prefix_of_a_request_that_is_known(live: Running) -> None:
    """Why all our request ids have one width."""
    same = {"max_new_tokens": 1500, "ignore_eos": True}
    plain = [Background(live, [1, 2, 300 + n], rid=f"victim-{n}", **same) for n in (1, 10)]
    until(lambda: running_requests(live) == 2, WAIT_S, "both run")
    with live.http() as http:
        assert http.post("/abort_request", json={"rid": "victim"}).status_code == 200  # nobody's
        assert running_requests(live) == 2
        assert http.post("/abort_request", json={"rid": "victim-1"}).status_code == 200
    for one in plain:
        response = one.wait()
        assert response.status_code == 200
        finish = response.json()["meta_info"]["finish_reason"]
        assert (finish["type"], finish["message"], finish["status_code"]) == ("abort", "Aborted", None)
        assert len(response.json()["output_ids"]) < 1500


def test_request_that_is_given_up_is_aborted_on_the_server(live: Running) -> None:
    async def work(client: SGLangClient) -> None:
        first = asyncio.Event()
        request = asyncio.create_task(
            client.complete(Request([1, 2, 300], GREEDY, 1500), lambda ids: first.set())
        )
        await first.wait()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    ask(live, work)
    until(lambda: running_requests(live) == 0, WAIT_S, "nothing runs any more")


def test_load_counts_what_runs(live: Running) -> None:
    same = {"max_new_tokens": 1500, "ignore_eos": True}
    requests = [Background(live, [1, 2, 300 + n], rid=f"l{n}", **same) for n in range(3)]
    until(lambda: running_requests(live) == 3, WAIT_S, "three run")
    load = ask(live, lambda client: client.load())
    assert load is not None
    assert (load.running, load.queued) == (3, 0)
    assert load.used_tokens and load.as_of
    abort_all(live)
    for request in requests:
        request.wait()


def test_retracted_requests_all_come_to_an_end(engine: Engine, tmp_path: Path) -> None:
    flags = {"max-total-tokens": 1500, "schedule-conservativeness": 0.1}
    with running(engine.write_profile(tmp_path, **flags)) as live:
        lengths = {"max_new_tokens": 250, "min_new_tokens": 200}
        bodies = [Background(live, [1, 2, 300 + n] * 6, **lengths) for n in range(8)]
        answers = [body.wait().json() for body in bodies]
        assert all(a["meta_info"]["finish_reason"]["type"] in ("stop", "length") for a in answers)
        assert all(len(a["output_ids"]) >= 200 for a in answers)
        assert sum(a["meta_info"]["num_retractions"] for a in answers) >= 1
        assert live.server.process is not None
        assert read_log(live.server.process.log).retractions >= 1


# --- ends


def tree(server: Server) -> list[psutil.Process]:
    assert server.process is not None
    main = psutil.Process(server.process.pid)
    return [main, *main.children(recursive=True)]


def test_stop_with_requests_in_flight_is_quick_and_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    with running(engine.write_profile(tmp_path)) as live:
        request = Background(live, [1, 2, 300], max_new_tokens=1900, ignore_eos=True)
        until(lambda: running_requests(live) > 0, WAIT_S, "it runs")
        processes = tree(live.server)
        config = list((tmp_path / "servers").glob("*.yaml"))
        live.supervisor.stop_all()
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)
        assert request.wait().json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert live.server.process is not None
        assert live.server.process.exit_status == 0
        assert config and not any(path.exists() for path in config)


def test_dead_scheduler_is_seen_and_its_open_stream_goes_on(engine: Engine, tmp_path: Path) -> None:
    with running(engine.write_profile(tmp_path)) as live:
        died_at = 0.0

        def kill() -> None:
            nonlocal died_at
            died_at = time.monotonic()
            live.server._schedulers[0].send_signal(signal.SIGKILL)

        kept: list[int] = []

        async def work(client: SGLangClient) -> None:
            first = asyncio.Event()

            def take(ids: list[int]) -> None:
                kept.extend(ids)
                if len(kept) > live.profile.server.stream_interval:
                    first.set()

            request = asyncio.create_task(client.complete(Request([1, 2, 300], GREEDY, 1900), take))
            await first.wait()
            await asyncio.to_thread(kill)
            while not live.server.scheduler_lost():
                assert time.monotonic() - died_at < WAIT_S
                await asyncio.sleep(0.05)
            await request

        with pytest.raises(ConnectionBroke):
            ask(live, work)
        lost = Lost(live.server, Loss("zombie", "its scheduler is gone"), answers=1)
        verdict = live.supervisor.diagnose(lost)
        assert verdict.action == "relaunch"
        (again,) = live.supervisor.launch()
        facts = live.supervisor.pass_gate(again, 128)
        assert facts.kv_tokens == live.facts.kv_tokens
        live.server = again

        async def go_on(client: SGLangClient) -> tuple[list[int], list[int]]:
            whole = (await client.complete(Request([1, 2, 300], GREEDY, len(kept) + 30))).output_ids
            return whole, (await client.complete(Request([1, 2, 300, *kept], GREEDY, 30))).output_ids

        whole, rest = ask(live, go_on)
        assert [*kept, *rest] == whole


def test_too_little_memory_at_the_start_is_answered_by_stepping_up(engine: Engine, tmp_path: Path) -> None:
    flags = {"mem-fraction-static": 0.00001, "max-total-tokens": None}
    _, supervisor, _ = make_supervisor(engine.write_profile(tmp_path, **flags))
    try:
        (server,) = supervisor.launch()
        with pytest.raises(LaunchFailed) as refused:
            supervisor.pass_gate(server, 128)
        verdict = supervisor.diagnose(refused.value)
        assert verdict.action == "step"
        (step,) = verdict.steps
        assert step.flag == "mem-fraction-static"
        assert isinstance(step.after, float) and step.after > 0.005
        (again,) = supervisor.launch()
        assert supervisor.pass_gate(again, 128).kv_tokens
        assert again.flags["mem-fraction-static"] == step.after
    finally:
        supervisor.stop_all()


def test_wrong_flag_stops_at_once_and_says_which(engine: Engine, tmp_path: Path) -> None:
    _, supervisor, _ = make_supervisor(engine.write_profile(tmp_path, **{"no-such-flag": 1}))
    try:
        (server,) = supervisor.launch()
        with pytest.raises(LaunchFailed) as refused:
            supervisor.pass_gate(server, 128)
        verdict = supervisor.diagnose(refused.value)
        assert verdict.action == "stop"
        assert "no-such-flag" in str(supervisor.gave_up(verdict, refused.value))
    finally:
        supervisor.stop_all()
