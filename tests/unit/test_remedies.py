"""What follows a server's death."""

from __future__ import annotations

from pathlib import Path

import pytest
from deaths import FRACTION, HICACHE, NEW, death, headroom, steps_of

from promptmill.serving.logs import LogDigest
from promptmill.serving.remedies import Death, Verdict, decide
from promptmill.serving.signatures import Evidence, cause_of_death, classify

DATA = Path(__file__).parent / "data"

WORDS = [row.split("\t") for row in (DATA / "last_words.tsv").read_text("utf-8").splitlines()[1:]]
# --- one row each

FIRST = {
    "gpu_oom": "step", "graph_capture": "step", "kv_budget": "step", "kv_slots": "step",
    "memory_leak": "step",
    "unbalanced": "wait", "port_wait": "wait", "address_in_use": "wait", "host_memory": "wait",
    "illegal_access": "relaunch", "nccl": "relaunch", "watchdog": "relaunch", "killed_in_init": "relaunch",
    "child_killed": "relaunch", "child_crashed": "relaunch", "warmup": "relaunch", "token_state": "relaunch",
    "sigterm": "relaunch", "crashed": "relaunch", "killed": "relaunch", "unknown": "relaunch",
    "xid": "stop", "shm": "stop", "disk_full": "stop", "bad_model": "stop", "config": "stop",
    "bad_value": "stop", "kv_dtype": "stop", "environment": "stop",
}  # fmt: skip


@pytest.mark.parametrize(("name", "phase", "status", "line"), WORDS, ids=[f"{w[0]}-{w[1]}" for w in WORDS])
def test_each_row_of_the_table(name: str, phase: str, status: str, line: str) -> None:
    exit_status = int(status) if status else None
    ours = "serving" if phase == "serving" else "start"
    digest = LogDigest()
    if phase == "serving":
        digest.feed(b"The server is fired up and ready to roll!\n")
    digest.feed(line.encode() + b"\n")
    evidence = classify(digest, exit_status, ours)
    if phase not in ("serving", "start"):
        evidence = Evidence(name, evidence.line, evidence.numbers, phase)
    one = death(phase=ours, flags={FRACTION: 0.8})
    last = Death(one.server, ours, cause_of_death(evidence, exit_status), exit_status, evidence, 0, one.flags)
    verdict = decide([last], 8, NEW)
    expected = FIRST[name]
    if (name, phase) == ("gpu_oom", "loading") or "unhandled system error" in line:
        expected = "stop"
    assert verdict.action == expected, verdict
    assert verdict.why
    assert bool(verdict.steps) == (expected == "step")
    assert bool(verdict.advice) == (expected == "stop")
    assert (verdict.wait_s > 0) == (expected == "wait")
    assert verdict.relaunch == (expected != "stop")


@pytest.mark.parametrize(
    ("case", "phase", "status", "signature", "remedy"),
    [
        ("S06_oom_run", "serving", -9, "gpu_oom", (FRACTION, 0.88)),
        ("S06_oom_start", "start", 1, "kv_budget", (FRACTION, 0.55)),
        ("S06_prefill_oom", "serving", -9, "kv_slots", ("schedule-conservativeness", 1.3)),
        ("S01_health_lies", "serving", None, "unknown", None),
        ("S02_busy_not_dead", "serving", None, "unknown", None),
        ("S09_throughput_fall", "serving", None, "unknown", None),
    ],
)
def test_the_logs_of_the_cases(
    case: str, phase: str, status: int | None, signature: str, remedy: tuple[str, float] | None
) -> None:
    digest = LogDigest()
    if phase == "serving":
        digest.feed(b"The server is fired up and ready to roll!\n")
    digest.feed((DATA / f"case_{case}.txt").read_bytes())
    digest.finish()
    evidence = classify(digest, status, phase)
    assert evidence.signature == signature
    if remedy is None:
        assert not digest.matches, "nobody died"
        assert digest.health_failures == (case == "S02_busy_not_dead")
        assert digest.decode_lines == (case != "S01_health_lies")
        return
    fraction = 0.93 if phase == "serving" else 0.5
    one = death(phase=phase)
    last = Death(one.server, phase, "x", status, evidence, 0, {FRACTION: fraction})
    assert [(step.flag, step.after) for step in decide([last], 8).steps] == [remedy]


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("hang", "relaunch"),
        ("zombie", "relaunch"),
        ("lost_requests", "relaunch"),
        ("collapse", "relaunch"),
        ("no_start_progress", "relaunch"),
        ("refused", "wait"),
        ("ids_differ", "stop"),
        ("wrong_server", "stop"),
        ("kv_too_small", "stop"),
        ("low_headroom", "step"),
    ],
)
def test_each_signature_of_the_gate_and_the_watch(name: str, action: str) -> None:
    assert decide([death(name, exit_status=None)], 8).action == action


# --- the rest


def test_an_illegal_access_turns_off_one_suspicious_feature_after_the_other() -> None:
    first = death("illegal_access", answers=1)
    flags = HICACHE | {"speculative-algorithm": "EAGLE", "speculative-num-steps": 3}
    assert steps_of(first, death("illegal_access", flags=flags)) == {"enable-hierarchical-cache": None}
    flags.pop("enable-hierarchical-cache")
    drafting = steps_of(first, death("illegal_access", flags=flags))
    assert drafting == {"speculative-algorithm": None, "speculative-num-steps": None}
    assert steps_of(first, death("illegal_access")) == {"disable-overlap-schedule": True}
    bare = death("illegal_access", flags={"disable-overlap-schedule": True})
    assert decide([first, bare], 8).action == "relaunch"


def test_the_watchdog_is_given_more_time_the_second_time() -> None:
    first = death("watchdog", numbers={"timeout_s": 300}, answers=3)
    assert steps_of(first, first) == {"watchdog-timeout": 600}
    assert steps_of(first, death("watchdog", flags={"watchdog-timeout": 1200})) == {"watchdog-timeout": 1800}
    slow = death("watchdog", flags={"watchdog-timeout": 1800}, in_flight=8)
    assert steps_of(first, slow) == {"max-running-requests": 6}


def test_the_leak_check_is_turned_off_once() -> None:
    name = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"
    assert steps_of(death("memory_leak")) == {f"env:{name}": "0"}
    assert decide([death("memory_leak", env={name: "0"})], 8).action == "relaunch"


@pytest.mark.parametrize("name", ["unbalanced", "port_wait", "address_in_use", "refused"])
def test_waits_grow_and_end(name: str) -> None:
    deaths = [death(name, life, phase="start") for life in range(3)]
    assert [decide(deaths[:n], 8).wait_s for n in (1, 2)] == [30, 60]
    assert decide(deaths, 8).action == "stop"


def test_a_second_collapse_takes_fewer_requests() -> None:
    first = death("collapse", answers=50, in_flight=94)
    assert decide([first], 8).action == "relaunch"
    assert steps_of(first, first) == {"max-running-requests": 70}
    assert decide([first, death("collapse", answers=1)], 8).action == "relaunch", "how many ran is not known"


def test_a_start_that_stands_still_is_tried_once_more() -> None:
    deaths = [death("no_start_progress", life, phase="start") for life in range(2)]
    assert [decide(deaths[:n], 8).action for n in (1, 2)] == ["relaunch", "stop"]


# --- prompts that kill


def test_a_death_that_convicts_a_prompt_needs_no_other_remedy() -> None:
    oom = death("gpu_oom", flags={FRACTION: 0.88}, quarantined=("p2",))
    verdict = decide([death("exception"), oom], 8)
    assert (verdict.action, verdict.steps) == ("quarantine", ())
    assert "p2" in verdict.why


def test_a_conviction_makes_deaths_differ() -> None:
    same = [death("exception", life, line="IndexError: 7") for life in range(3)]
    assert decide(same, 8).action == "stop"
    convicted = death("exception", 2, line="IndexError: 7", quarantined=("p",))
    assert decide([*same[:2], convicted], 8).action == "quarantine"
    assert decide([*same[:1], convicted, same[2]], 8).relaunch


def test_a_server_that_is_away_again_after_answers_is_waited_for_afresh() -> None:
    away = death("refused")
    assert decide([away, away, away], 8).action == "stop"
    assert decide([away, away, death("refused", answers=9)], 8).wait_s == 30
    assert decide([away, away, death("refused", quarantined=("p",)), away], 8).wait_s == 30


# --- when to give up


def test_three_identical_deaths_without_an_answer_stop() -> None:
    same = [death("", life, cause="{server}: exit status 1\nlog of life {server}") for life in range(3)]
    assert decide(same[:2], 8).relaunch
    assert "3 lives" in decide(same, 8).why
    assert not decide([death(answers=5), *same], 8).relaunch
    assert not decide([headroom(f, life=n) for n, f in enumerate((0.93, 0.88, 0.83))], 8).relaunch


@pytest.mark.parametrize(
    "deaths",
    [
        [death("hang"), death("hang", 1, answers=1), death("hang", 2)],
        [death("hang"), death("zombie", 1), death("hang", 2)],
        [death("hang", phase="start"), death("hang", 1), death("hang", 2)],
        [
            death("exception", line="IndexError: 7"),
            death("exception"),
            death("exception", line="KeyError: 1"),
        ],
        [death("", cause="a"), death("", 1, cause="b"), death("", 2, cause="a")],
    ],
)
def test_three_deaths_that_differ_or_answered_do_not(deaths: list[Death]) -> None:
    assert decide(deaths, 8).relaunch


@pytest.mark.parametrize("cause", ["", "{server}"])
def test_a_death_without_words_counts_as_well(cause: str) -> None:
    assert not decide([death("", life, cause=cause) for life in range(3)], 8).relaunch


def test_relaunches_are_counted_and_the_setting_is_named() -> None:
    deaths = [death("hang", life, answers=1) for life in range(4)]
    assert decide(deaths[:2], 2).relaunch
    assert decide(deaths[:3], 2) == Verdict("stop", "server.max_relaunches = 2 is used up")
    assert not decide(deaths[:1], 0).relaunch


def test_a_permanent_failure_stops_at_once() -> None:
    assert not decide([death(permanent=True)], 8).relaunch
    assert not decide([death("watchdog", permanent=True)], 8).relaunch
    assert decide([death("ids_differ", permanent=True)], 8).advice
