"""What a server died of, by its log and its exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptmill.serving.logs import LogDigest, read_log
from promptmill.serving.signatures import LOG_PHASES, SIGNATURES, Evidence, cause_of_death, classify

DATA = Path(__file__).parent / "data"

UP_TO = {
    "arguments": [],
    "loading": ["[2031-02-03 04:00:00 TP0] Load weight begin. avail mem=93.50 GB"],
    "kv": ["[2031-02-03 04:00:00 TP0] Load weight end. elapsed=17.04 s, avail mem=28.23 GB"],
    "graphs": ["[2031-02-03 04:00:00 TP0] Capture cuda graph begin. avail mem=8.22 GB"],
    "warmup": ["[2031-02-03 04:00:00 TP0] max_total_num_tokens=159000, available_gpu_mem=5.47 GB"],
    "serving": ["The server is fired up and ready to roll!"],
}
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.10 GiB. GPU 3 has a total capacity of "
    "94.00 GiB of which 812.00 MiB is free. Including non-PyTorch memory, this process has 93.20 GiB in use."
)
CRASH = "[2031-02-03 05:00:00 TP3] Scheduler hit an exception: Traceback (most recent call last):"
SUICIDE = (
    "[2031-02-03 05:00:01] SIGQUIT received. signum=None, frame=None. It usually means one child failed."
)
BATCH = "[2031-02-03 05:00:00 TP0] Decode batch, #running-req: 40, #token: 15890, token usage: 0.97"


def log_of(phase: str, *lines: str) -> LogDigest:
    digest = LogDigest()
    digest.feed("\n".join([*UP_TO[phase], *lines, ""]).encode())
    assert digest.phase == phase
    return digest


WORDS = [row.split("\t") for row in (DATA / "last_words.tsv").read_text("utf-8").splitlines()[1:]]
"""Signature, phase of the log, exit status, last line."""


@pytest.mark.parametrize(("name", "phase", "status", "line"), WORDS, ids=[f"{w[0]}-{w[1]}" for w in WORDS])
def test_classify_knows_each_row_of_the_table(name: str, phase: str, status: str, line: str) -> None:
    digest = log_of("arguments" if phase == "start" else phase, *filter(None, [line]))
    exit_status = int(status) if status else None
    evidence = classify(digest, exit_status, "serving" if phase == "serving" else "start")
    assert evidence.signature == name
    assert evidence.log_phase == digest.phase
    assert not evidence.line or evidence.line[-20:] == line[-20:]
    sentence = cause_of_death(evidence, exit_status)
    assert "\n" not in sentence
    assert "{" not in sentence


@pytest.mark.parametrize("name", [one.name for one in SIGNATURES])
def test_every_signature_has_a_row_here_and_a_sentence(name: str) -> None:
    assert name in {words[0] for words in WORDS} | {"exception", "child_died"}
    assert not cause_of_death(Evidence(name), None).startswith(name)


@pytest.mark.parametrize(
    ("name", "status", "phase", "signature", "words"),
    [
        ("bad_model_path", 1, "start", "bad_model", "Repo id must be"),
        ("not_enough_mem", -9, "start", "kv_budget", "no room for the KV pool"),
        ("oov_crash", 137, "serving", "exception", "IndexError: index out of range"),
        ("port_in_use", 3, "start", "address_in_use", "its port was taken"),
        ("sched_sigkill", -9, "serving", "child_killed", "was killed under load"),
        ("sigterm", 0, "serving", "sigterm", "somebody else told it to end"),
        ("smollm2_kv_saturation", None, "serving", "unknown", "does not say why"),
    ],
)
def test_classify_a_real_log(name: str, status: int, phase: str, signature: str, words: str) -> None:
    evidence = classify(read_log(DATA / f"log_{name}.txt"), status, phase)
    assert evidence.signature == signature
    assert words in cause_of_death(evidence, status)


def test_numbers_are_read_in_gib() -> None:
    evidence = classify(log_of("serving", OOM), -9, "serving")
    assert evidence.numbers["tried_gib"] == 1.1
    assert evidence.numbers["free_gib"] == pytest.approx(0.793, abs=0.001)
    assert evidence.numbers["process_gib"] == 93.2
    assert cause_of_death(evidence, -9) == (
        "CUDA out of memory under load (1.10 GiB wanted, 0.79 GiB free) (exit status -9)"
    )
    budget = classify(read_log(DATA / "log_not_enough_mem.txt"), -9, "start")
    assert budget.numbers == {"minimum": 0.005, "current": 1e-05}


@pytest.mark.parametrize("status", [-9, 137])
def test_a_server_that_ends_itself_was_not_killed_by_the_kernel(status: int) -> None:
    evidence = classify(log_of("serving", CRASH, OOM, SUICIDE), status, "serving")
    assert evidence.signature == "gpu_oom"
    silent = classify(log_of("serving", SUICIDE), status, "serving")
    assert silent.signature == "child_died"
    assert "host memory" not in cause_of_death(silent, status)


def test_a_log_without_phases_is_read_by_what_we_know() -> None:
    digest = log_of("arguments", "ValueError: not of SGLang", "ggml: CUDA out of memory")
    assert classify(digest, 1, "serving").log_phase == "serving"
    killed = classify(log_of("arguments", "main: server is listening"), -9, "serving")
    assert cause_of_death(killed, -9).startswith("it was killed under load without a word")
    raised = log_of("arguments", "ValueError: not of SGLang")
    assert classify(raised, 1, "serving").signature == "exception"
    assert classify(raised, 1, "start").signature == "bad_value"


def test_the_root_counts_and_not_what_follows_from_it() -> None:
    lines = [
        "[rank0]: ProcessGroupNCCL's watchdog got stuck for 480 seconds",
        CRASH,
        "RuntimeError: NCCL error: remote process exited",
        OOM,
        "[2031-02-03 05:00:00] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        SUICIDE,
    ]
    assert classify(log_of("serving", *lines), -9, "serving").signature == "gpu_oom"
    assert classify(log_of("serving", *lines[4:], *lines[:3]), -9, "serving").signature == "watchdog"


def test_what_the_server_outlived_was_not_its_death() -> None:
    disk = "OSError: [Errno 28] No space left on device"
    outlived = log_of("serving", disk, *[BATCH] * 60)
    assert classify(outlived, -9, "serving").signature == "killed"
    assert classify(log_of("serving", disk, *[BATCH] * 10), -9, "serving").signature == "disk_full"
    again = log_of("serving", disk, *[BATCH] * 60, disk)
    assert classify(again, -9, "serving").signature == "disk_full"


def test_a_soft_watchdog_and_a_quoted_prompt_kill_nobody() -> None:
    digest = log_of(
        "serving",
        "[2031-02-03 05:00:00] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
        "[2031-02-03 05:00:00] Receive: obj=GenerateReqInput(text='CUDA out of memory')",
        '[2031-02-03 05:00:00] INFO:     1.2.3.4:5 - "GET /CUDA%20out of memory HTTP/1.1" 404 Not Found',
    )
    assert not digest.matches


def test_the_signatures_of_the_cases() -> None:
    run = log_of("serving", CRASH, '  File "scheduler.py", line 1, in event_loop', OOM, SUICIDE)
    start = log_of("kv", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                   "Current value: self.server_args.mem_fraction_static=0.5")  # fmt: skip
    slots = log_of("serving", "RuntimeError: Prefill out of memory. Try to lower your batch size.")
    assert classify(run, -9, "serving").signature == "gpu_oom"
    assert classify(start, 1, "start").numbers == {"current": 0.5}
    assert classify(slots, -9, "serving").signature == "kv_slots"
    busy = log_of("serving", "Health check failed. Server couldn't get a response from detokenizer", BATCH)
    assert (busy.health_failures, busy.matches, busy.decode_lines) == (1, {}, 1)
    assert LOG_PHASES.index("arguments") < LOG_PHASES.index("serving")
