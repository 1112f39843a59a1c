"""The simulator as a process, against what a real SGLang 0.5.23 answered and logged, and how it ended."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

_DEADLINE_S = 120.0
_SPEED = "200"


class _Sim:
    """One server, ended with the test."""

    def __init__(self, log: Path, *given: str, port: int | None = None) -> None:
        self.port = port or _free_port()
        self.log = log
        command = [sys.executable, "-m", "promptmill.sim", "--model-path", "sim", "--port", str(self.port)]
        command += ["--device", "cpu", "--context-length", "2048", "--sim-speed", _SPEED, *given]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def __enter__(self) -> _Sim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_DEADLINE_S)

    def until_ready(self) -> _Sim:
        self.until("The server is fired up and ready to roll!")
        return self

    def until(self, words: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while words not in self.text():
            assert self.process.poll() is None or words in self.text(), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def exit_status(self) -> int:
        return self.process.wait(_DEADLINE_S)

    def ask(
        self, path: str, body: Any = None, method: str | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_DEADLINE_S)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if data is None else "POST"), path, data, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def generate(self, ids: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "rid": rid, "sampling_params": {"temperature": 0, **sampling}}
        status, answer = self.ask("/generate", body)
        assert status == 200, answer
        result: dict[str, Any] = json.loads(answer)
        return result

    def stream(self, ids: list[int], **sampling: Any) -> list[dict[str, Any]]:
        body = {"input_ids": ids, "stream": True, "sampling_params": {"temperature": 0, **sampling}}
        status, answer = self.ask("/generate", body)
        *events, done = answer.decode().strip().split("\n\n")
        assert (status, done) == (200, "data: [DONE]")
        return [json.loads(event.removeprefix("data: ")) for event in events]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Sim]:
    log = tmp_path_factory.mktemp("sim") / "log"
    with _Sim(log, "--max-total-tokens", "4096", "--enable-metrics", "--api-key", "") as server:
        yield server.until_ready()


_TOO_MANY = (
    "Requested token count exceeds the model's maximum context length of 2048 tokens. You requested a total "
    "of 2100 tokens: 2000 tokens from the input messages and 100 tokens for the completion. Please reduce "
    "the number of tokens in the input messages or the completion to fit within the limit."
)
_FIELDS = (
    "`max_new_tokens`, `stop`, `stop_token_ids`, `stop_regex`, `temperature`, `top_p`, `top_k`, `min_p`, "
    "`frequency_penalty`, `presence_penalty`, `repetition_penalty`, `min_new_tokens`, `n`, `json_schema`, "
    "`regex`, `ebnf`, `structural_tag`, `ignore_eos`, `skip_special_tokens`, "
    "`spaces_between_special_tokens`, `no_stop_trim`, `stream_interval`, `logit_bias`, `sampling_seed`, "
    "`custom_params`, `beam_width`, `watermark`, `choice`"
)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({}, {"message": "Either text, input_ids or input_embeds should be provided."}),
        ({"input_ids": []}, {"message": "input_ids cannot be empty."}),
        (
            {"input_ids": [1, 2], "sampling_params": {"temperature": -1}},
            {"message": "temperature must be a non-negative finite number, got -1."},
        ),
        (
            {"input_ids": [1, 2], "sampling_params": {"nonsense": 1}},
            f"unknown field `nonsense`, expected one of {_FIELDS}",
        ),
        (
            {"input_ids": [7] * 3000},
            {"message": "The input (3000 tokens) is longer than the model's context length (2048 tokens)."},
        ),
        ({"input_ids": [7] * 2000, "sampling_params": {"max_new_tokens": 100}}, {"message": _TOO_MANY}),
    ],
)
def test_errors_are_the_server_s_own(sim: _Sim, body: dict[str, Any], error: Any) -> None:
    status, answer = sim.ask("/generate", body)
    assert (status, json.loads(answer)) == (400, {"error": error})


def test_bad_json_and_missing_messages_are_validation_errors(sim: _Sim) -> None:
    status, answer = sim.ask("/generate", b'{"input_ids":[1,2')
    error = (
        "{'type': 'json_invalid', 'loc': ('body', 17), 'msg': 'JSON decode error', 'input': {}, "
        "'ctx': {'error': 'unexpected end of data'}}"
    )
    assert status == 400
    assert json.loads(answer) == {
        "object": "error",
        "message": f"1 validation error:\n  {error}\n\n"
        '  File "site-packages/sglang/srt/entrypoints/http_server.py", line 928, in generate_request\n'
        f"    POST /generate [{error}]",
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }
    status, answer = sim.ask("/v1/chat/completions", {"model": "sim"})
    assert status == 400
    assert "'loc': ('body', 'messages'), 'msg': 'Field required'" in json.loads(answer)["message"]


def test_unknown_paths_are_404(sim: _Sim) -> None:
    assert sim.ask("/nope") == (404, b'{"detail":"Not Found"}')
    assert sim.ask("/get_load") == (404, b'{"detail":"Not Found"}')


def test_an_answer_has_the_server_s_keys(sim: _Sim) -> None:
    ids = [31, 32, 33, 34, 35]
    sim.generate(ids, max_new_tokens=1)
    answer = sim.generate(ids, "my-rid", max_new_tokens=8, ignore_eos=True)
    meta = answer["meta_info"]
    assert list(answer) == ["text", "output_ids", "meta_info"]
    assert list(meta) == [
        "id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions", "storage_prefetch_wait",
        "storage_staging_wait", "forward_entry_time", "prefill_finished_time", "queue_time",
        "reasoning_tokens", "completion_tokens", "cached_tokens", "weight_versions",
        "cached_tokens_details", "dp_rank", "e2e_latency",
        "request_received_ts", "first_token_latency", "api_server_dispatch_finish_ts", "request_finished_ts",
        "decode_throughput", "response_sent_to_client_ts",
    ]  # fmt: skip
    assert (meta["id"], meta["finish_reason"]) == ("my-rid", {"type": "length", "length": 8})
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 8, 4)


def test_a_broken_answer_can_be_continued_from_its_ids(sim: _Sim) -> None:
    prompt = [41, 42, 43]
    whole = sim.generate(prompt, max_new_tokens=60, ignore_eos=True)["output_ids"]
    for cut in (1, 7, 32):
        rest = sim.generate(prompt + whole[:cut], max_new_tokens=60 - cut, ignore_eos=True)["output_ids"]
        assert whole[:cut] + rest == whole


def test_a_stream_starts_with_one_token_and_goes_on_by_its_interval(sim: _Sim) -> None:
    chunks = sim.stream([51, 52], max_new_tokens=20, stream_interval=8, ignore_eos=True)
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 9, 17, 20]
    assert [chunk["meta_info"]["finish_reason"] for chunk in chunks[:-1]] == [None] * 3
    texts = [chunk["text"] for chunk in chunks]
    assert all(after.startswith(before) for before, after in pairwise(texts))


def test_errors_in_a_stream_come_under_its_200(sim: _Sim) -> None:
    status, answer = sim.ask("/generate", {"input_ids": [], "stream": True})
    error = {"message": "input_ids cannot be empty.", "type": "invalid_request_error", "code": 400}
    assert (status, json.loads(answer.split(b"\n\n")[0][6:])) == (
        200,
        {"error": error | {"retryable": False}},
    )
    assert answer.endswith(b"data: [DONE]\n\n")


def test_a_stop_id_is_the_last_id_and_no_text(sim: _Sim) -> None:
    first = sim.generate([61, 62], max_new_tokens=1, ignore_eos=True)["output_ids"][0]
    answer = sim.generate([61, 62], max_new_tokens=20, stop_token_ids=[first])
    assert (answer["text"], answer["output_ids"]) == ("", [first])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


def test_near_the_context_s_end_the_length_is_clipped(sim: _Sim) -> None:
    finish = sim.generate([7] * 2040, max_new_tokens=7, ignore_eos=True)["meta_info"]["finish_reason"]
    assert finish == {"type": "length", "length": 6}


def test_abort_matches_prefixes_and_duplicates_are_refused(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", "--sim-speed", "2") as sim, ThreadPoolExecutor() as pool:
        sim.until_ready()
        endless = {"max_new_tokens": 2000, "ignore_eos": True}
        running = [pool.submit(sim.generate, [71], rid, **endless) for rid in ("p1", "p10")]
        deadline = time.monotonic() + _DEADLINE_S
        while _load(sim)["num_running_reqs"] < 2:
            assert time.monotonic() < deadline
        status, answer = sim.ask("/generate", {"rid": "p1", "input_ids": [1]})
        assert (status, answer) == (400, b'{"error":{"message":"Duplicate request ID detected: p1"}}')
        assert sim.ask("/flush_cache", b"") == (400, b"Flush cache failed.\n")
        assert sim.ask("/abort_request", {"rid": "p1"}) == (200, b"")
        for future in running:
            meta = future.result(_DEADLINE_S)["meta_info"]
            aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            assert meta["finish_reason"] == aborted
            assert 0 < meta["completion_tokens"] < 2000


def _load(sim: _Sim) -> dict[str, Any]:
    load: dict[str, Any] = json.loads(sim.ask("/v1/loads")[1])["loads"][0]
    return load


def test_the_server_tells_its_facts(sim: _Sim) -> None:
    info = json.loads(sim.ask("/server_info")[1])
    assert (info["max_total_num_tokens"], info["max_req_input_len"], info["version"]) == (
        4096,
        2042,
        "0.5.23",
    )
    assert info["internal_states"][0]["effective_max_running_requests_per_dp"] == 2048
    assert info["internal_states"][0]["memory_usage"]["token_capacity"] == 4096
    model = json.loads(sim.ask("/v1/models")[1])["data"][0]
    assert (model["id"], model["max_model_len"]) == ("sim", 2048)
    assert sim.ask("/health") == (200, b"")
    assert sim.ask("/ready")[0] == 200
    assert b"sglang:max_total_num_tokens{" in sim.ask("/metrics")[1]


def test_children_carry_sglang_s_titles(sim: _Sim) -> None:
    children = psutil.Process(sim.process.pid).children()
    assert {child.name() for child in children} == {"sglang::scheduler_TP0", "sglang::detokenizer"}
    assert {child.cmdline()[0] for child in children} == {"sglang::scheduler_TP0", "sglang::detokenizer"}


def test_start_logs_what_a_parser_reads(sim: _Sim) -> None:
    words = [
        "server_args={'model_path': 'sim'", "Load weight begin. avail mem=", "Load weight end. elapsed=",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size:", "Memory pool end. avail mem=",
        "max_total_num_tokens=4096, chunked_prefill_size=4096, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=2048, available_cpu_mem=",
        "Uvicorn running on http://127.0.0.1:", '"GET /model_info HTTP/1.1" 200 OK',
        "Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0.00, #running-req: 0, "
        "#queue-req: 0, #pending-token: 0, cpu graph: False, input throughput (token/s): ",
        "The server is fired up and ready to roll!",
    ]  # fmt: skip
    text = sim.text()
    positions = [text.index(word) for word in words]
    assert positions == sorted(positions)


def test_saturation_is_logged_and_counted(tmp_path: Path) -> None:
    given = ("--max-total-tokens", "1500", "--schedule-conservativeness", "0.1", "--sim-speed", "5")
    with _Sim(tmp_path / "log", *given) as sim, ThreadPoolExecutor() as pool:
        sim.until_ready()
        sampling = {"max_new_tokens": 200, "min_new_tokens": 200, "ignore_eos": True}
        first = pool.submit(sim.generate, [80] * 20, **sampling)
        sim.until("#new-token: 20,")  # one runs before the rest come: what runs is hardly reserved for
        rest = {"input_ids": [[81 + number] * 20 for number in range(7)], "sampling_params": sampling}
        answers = [*json.loads(sim.ask("/generate", rest)[1]), first.result(_DEADLINE_S)]
        assert [len(answer["output_ids"]) for answer in answers] == [200] * 8
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) >= 1
        sim.until("KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: ")


def test_an_id_out_of_the_vocabulary_kills_the_server(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log") as sim:
        sim.until_ready()
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            sim.ask("/generate", {"input_ids": [1, 999_999]})
        assert sim.exit_status() == -9
        text = sim.text()
    words = ["Scheduler hit an exception: Traceback", "IndexError: index out of range in self",
             "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
             "Sleeping 5 seconds before crash", "kill_process_tree called: parent_pid="]  # fmt: skip
    assert [text.index(word) for word in words] == sorted(text.index(word) for word in words)


def test_a_dead_scheduler_ends_the_server_and_its_children(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", "--tp-size", "2") as sim:
        sim.until_ready()
        children = psutil.Process(sim.process.pid).children()
        scheduler = next(child for child in children if child.name() == "sglang::scheduler_TP0")
        scheduler.kill()
        assert sim.exit_status() == -9
        assert f"Subprocess scheduler_0 (pid={scheduler.pid}) crashed with exit code -9." in sim.text()
        psutil.wait_procs(children, _DEADLINE_S)
        assert not any(child.is_running() for child in children)


def test_children_die_with_a_killed_server(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log") as sim:
        sim.until_ready()
        children = psutil.Process(sim.process.pid).children()
        sim.process.kill()
        _, alive = psutil.wait_procs(children, _DEADLINE_S)
        assert not alive


def test_sigterm_drains_and_still_serves(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", "--sim-speed", "20") as sim, ThreadPoolExecutor() as pool:
        sim.until_ready()
        running = pool.submit(sim.generate, [5, 6], max_new_tokens=600, ignore_eos=True)
        sim.until("#new-token: 2,")
        sim.process.send_signal(signal.SIGTERM)
        sim.until("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        assert sim.ask("/health")[0] == 503
        assert len(sim.generate([5], max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
        assert len(running.result(_DEADLINE_S)["output_ids"]) == 600
        assert sim.exit_status() == 0
        assert "Gracefully exiting... Remaining number of requests 0." in sim.text()


def test_a_frozen_scheduler_fails_health_alone(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", "--sim-fault", "freeze@answers=1") as sim:
        sim.until_ready()
        sim.generate([5], max_new_tokens=3)
        assert sim.ask("/health")[0] == 503
        assert "Health check failed. Server couldn't get a response from detokenizer" in sim.text()
        assert [sim.ask(path)[0] for path in ("/model_info", "/v1/models")] == [200, 200]
        assert _load(sim)["timestamp"] == _load(sim)["timestamp"]


def test_a_key_is_asked_for_everywhere_but_at_health(tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", "--api-key", "se-cret", "--skip-server-warmup") as sim:
        sim.until_ready()
        assert sim.ask("/model_info") == (401, b'{"error":"Unauthorized"}')
        headers = {"Authorization": "Bearer se-cret"}
        assert sim.ask("/server_info", headers=headers)[0] == 200
        assert json.loads(sim.ask("/server_info", headers=headers)[1])["api_key"] == "se-cret"
        assert sim.ask("/health")[0] == 200


def test_a_taken_port_is_noticed_after_the_load_and_ends_with_three(sim: _Sim, tmp_path: Path) -> None:
    with _Sim(tmp_path / "log", port=sim.port) as other:
        assert other.exit_status() == 3
        assert "[Errno 98] error while attempting to bind on address ('127.0.0.1', " in other.text()
        assert "available_cpu_mem=" in other.text()


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (
            ["--mem-fraction-static", "0.00001"],
            -9,
            "Loaded weights leave no GPU memory for the KV cache under",
        ),
        (["--sim-fault", "start:killed"], 1, "scheduler died during initialization (exit code: -9)"),
        (["--sim-fault", "start:bad-model"], 1, "OSError: Repo id must be in the form"),
        (["--sim-fault", "nccl@answers=0"], -9, "crashed with exit code -6"),
        (
            ["--sim-fault", "watchdog"],
            -9,
            "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        ),
        (["--cuda-graph-max-bs", "8"], 2, "ambiguous option"),
    ],
)
def test_failures_have_their_status_and_words(
    given: list[str], status: int, words: str, tmp_path: Path
) -> None:
    with _Sim(tmp_path / "log", *given) as sim:
        assert sim.exit_status() == status
        assert words in sim.text()


def test_a_fault_ends_with_its_lives(tmp_path: Path) -> None:
    given = ("--sim-fault", "start:oom,lives=1", "--sim-state-dir", str(tmp_path / "state"))
    with _Sim(tmp_path / "first", *given) as sim:
        assert sim.exit_status() == -9
        assert "Received sigquit from a child process." in sim.text()
    with _Sim(tmp_path / "second", *given) as sim:
        sim.until_ready()
