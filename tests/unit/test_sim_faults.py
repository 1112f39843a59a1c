"""Scripted faults: their grammar, their triggers, and the words by which a log is read."""

from __future__ import annotations

import re

import pytest

from promptmill.sim import crashes
from promptmill.sim.faults import HTTP, SCHEDULER, BadFault, Fault, Triggers, parse_fault, parse_faults

_FACTS = {
    "gpu": 94.97, "free": 0.8, "used": 94.17, "ninety": 85.5, "asked": 120.0, "host": 64.0, "kv_tokens": 1,
    "graph_flag": "--cuda-graph-max-bs-decode", "text": "ValueError: Loaded weights leave no GPU memory",
}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("start:oom", Fault("oom", at_start=True)),
        ("start:slow-progress:30,lives=1", Fault("slow-progress", True, "30", lives=1)),
        ("start:shm:bus", Fault("shm", True, "bus")),
        ("die@answers=10", Fault("die", trigger="answers", value=10)),
        ("freeze:70@t=30", Fault("freeze", False, "70", "t", 30)),
        ("oom@token=77,lives=2", Fault("oom", False, None, "token", 77, 2)),
        ("http500:3", Fault("http500", False, "3")),
    ],
)
def test_fault_parses(line: str, fault: Fault) -> None:
    assert parse_fault(line) == fault


@pytest.mark.parametrize(
    "line", ["nonsense", "start:busy", "die@moon=1", "start:oom@t=1", "die@t=", "oom lives=1"]
)
def test_fault_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(BadFault):
        parse_fault(line)


def test_faults_end_with_their_lives() -> None:
    lines = ["# two lives", "", "die@answers=3,lives=2", "oom@token=5"]
    assert [fault.name for fault in parse_faults(lines, 2)] == ["die", "oom"]
    assert [fault.name for fault in parse_faults(lines, 3)] == ["oom"]


def test_triggers_fire_once_and_poison_always() -> None:
    faults = [parse_fault(line) for line in ("die@answers=3", "freeze@t=10", "cut@t=0", "oom@token=5")]
    triggers = Triggers(faults, SCHEDULER)
    assert triggers.due(2, 9, 9.0) == []
    assert [fault.name for fault in triggers.due(3, 0, 10.0)] == ["die", "freeze"]
    assert triggers.due(9, 9, 99.0) == []
    assert [fault.name for fault in triggers.poisoned([1, 5])] == ["oom"]
    assert triggers.poisoned([1, 5]) and not triggers.poisoned([1])
    assert [fault.name for fault in Triggers(faults, HTTP).due(0, 0, 0.0)] == ["cut"]


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("oom", r"torch\.(cuda\.)?OutOfMemoryError|CUDA out of memory"),
        ("graph-oom", r"Capture cuda graph failed"),
        ("kv", r"Loaded weights leave no GPU memory"),
        ("unbalanced", r"The memory capacity is unbalanced\. Some GPUs may be occupied"),
        ("nccl", r"NCCL error.*unhandled system error"),
        ("shm", r"Error while creating shared memory segment"),
        ("host-memory", r"Not enough host memory available\. Requesting 120\.00 GB"),
        ("disk", r"No space left on device"),
        ("import", r"ImportError"),
        ("dist-port", r"is not available in 30 seconds"),
        ("kv-oom", r"(Prefill|Decode) out of memory\. Try to lower your batch size"),
        ("illegal", r"CUDA error: an illegal memory access|AcceleratorError"),
        ("leak", r"memory leak detected"),
        ("oov", r"IndexError: index out of range in self"),
    ],
)
def test_crash_has_its_signature(name: str, signature: str) -> None:
    text = crashes.hit_an_exception(name, True, _FACTS)
    assert text.startswith("Scheduler hit an exception: Traceback (most recent call last):\n")
    assert re.search(signature, text)


def test_other_ends_have_their_signatures() -> None:
    assert "HFValidationError: Repo id must be" in crashes.bad_model("/no")
    assert re.search(r"only supports kv-cache-dtype of", crashes.bad_kv_dtype("fp8_e5m2"))
    assert "scheduler died during initialization (exit code: -9)" in crashes.died_during_init(-9)
    assert "Watchdog caught collective operation timeout" in crashes.NCCL_ABORT
