"""What follows when a server has too little memory, of either kind."""

from __future__ import annotations

from typing import Any

import pytest
from deaths import FRACTION, HICACHE, NEW, OLD, death, headroom, steps_of

from promptmill.serving.logs import LogFacts
from promptmill.serving.remedies import Death, Step, decide


def test_kimi_died_under_load_at_093_and_goes_on_at_088() -> None:
    verdict = decide([death("gpu_oom", flags={FRACTION: 0.93}, answers=1374)], 8, OLD)
    assert verdict.steps == (Step(FRACTION, 0.93, 0.88),)
    assert verdict.why == "CUDA out of memory under load: mem-fraction-static 0.93 → 0.88"


def test_kimi_is_refused_by_the_gate_at_093_and_goes_on_at_088() -> None:
    verdict = decide([headroom(0.93)], 8, OLD)
    assert verdict.steps == (Step(FRACTION, 0.93, 0.88),)
    assert verdict.why == "0.82 GiB of GPU memory left, 2.00 wanted: mem-fraction-static 0.93 → 0.88"


def test_the_fraction_in_effect_counts_where_no_flag_says_one() -> None:
    assert steps_of(death("gpu_oom", facts=LogFacts(mem_fraction_static=0.876))) == {FRACTION: 0.83}
    unknown = decide([death("gpu_oom")], 8)
    assert unknown.steps == (Step(FRACTION, None, 0.85),)
    assert "not known" in unknown.why
    assert steps_of(death("gpu_oom", flags={FRACTION: "0.9"})) == {FRACTION: 0.85}


def test_the_ladder_goes_down_rung_by_rung_and_ends() -> None:
    flags: dict[str, Any] = {FRACTION: 0.62, "chunked-prefill-size": 4096, "cuda-graph-max-bs": 32}
    deaths, taken = [], []
    for life in range(40):
        deaths.append(death("gpu_oom", life, flags=dict(flags), answers=5, in_flight=4))
        verdict = decide(deaths, 99, OLD)
        if verdict.action == "stop":
            break
        taken += [(step.flag, step.after) for step in verdict.steps]
        flags |= dict(taken[-1:])
    assert taken == [
        (FRACTION, 0.57), (FRACTION, 0.52),
        ("chunked-prefill-size", 2048), ("chunked-prefill-size", 1024),
        ("cuda-graph-max-bs", 16), ("cuda-graph-max-bs", 8),
        ("max-running-requests", 3), ("max-running-requests", 2), ("max-running-requests", 1),
    ]  # fmt: skip
    assert "nothing is left" in verdict.why


@pytest.mark.parametrize(
    ("version", "expected"),
    [(OLD, "cuda-graph-max-bs"), (NEW, "cuda-graph-max-bs-decode"), ((0, 5, 15), FRACTION), (None, FRACTION)],
)
def test_the_flag_of_cuda_graphs_is_named_by_version(version: tuple[int, ...] | None, expected: str) -> None:
    oom = death("gpu_oom", phase="start", log_phase="graphs", flags={FRACTION: 0.9})
    assert list(steps_of(oom, version=version)) == [expected]
    assert steps_of(oom, oom, version=version) == {FRACTION: 0.85}
    named = death("graph_capture", log_phase="graphs", flags={"cuda-graph-max-bs": 160})
    assert steps_of(named) == {"cuda-graph-max-bs": 80}


def test_no_room_for_the_kv_pool_goes_up_to_the_printed_minimum_and_a_margin() -> None:
    told = {"minimum": 0.8044, "current": 0.7}
    assert steps_of(death("kv_budget", phase="start", numbers=told)) == {FRACTION: 0.86}
    assert steps_of(death("kv_budget", flags={FRACTION: 0.5})) == {FRACTION: 0.55}
    assert steps_of(death("kv_budget", flags={FRACTION: 0.88}, numbers={"minimum": 0.92})) == {FRACTION: 0.94}
    assert steps_of(death("kv_budget")) == {FRACTION: 0.85}
    assert decide([death("kv_budget", numbers={"minimum": 0.96})], 8).action == "stop"


@pytest.mark.parametrize("first", [headroom(0.88), death("gpu_oom", flags={FRACTION: 0.88}, answers=9)])
def test_squeezed_between_two_troubles_stops_and_names_both(first: Death) -> None:
    budget = death("kv_budget", 1, phase="start", flags={FRACTION: 0.83}, numbers={"minimum": 0.84})
    verdict = decide([first, budget], 8)
    assert verdict.action == "stop"
    for words in (verdict.why, verdict.advice):
        assert "0.83" in words
        assert "0.88" in words


def test_graphs_that_have_been_made_smaller_squeeze_no_more() -> None:
    flags = {FRACTION: 0.88, "cuda-graph-max-bs": 160}
    graphs = death("gpu_oom", phase="start", log_phase="graphs", flags=flags)
    told = {"kv_tokens": 9000, "wanted_tokens": 10000}
    small = death("kv_too_small", 1, phase="start", numbers=told, flags={**flags, "cuda-graph-max-bs": 80})
    assert steps_of(graphs, small) == {FRACTION: 0.91}
    again = death("kv_too_small", 1, phase="start", numbers=told, flags=flags)
    assert decide([graphs, again], 8).action == "stop"


def test_the_way_down_does_not_go_where_the_kv_pool_is_known_to_be_too_small() -> None:
    small = death("kv_too_small", numbers={"kv_tokens": 9000, "wanted_tokens": 10000}, flags={FRACTION: 0.86})
    assert steps_of(small) == {FRACTION: 0.89}
    tight = death("gpu_oom", 1, flags={FRACTION: 0.89, "chunked-prefill-size": 8192})
    assert steps_of(small, tight) == {"chunked-prefill-size": 4096}


@pytest.mark.parametrize(
    "more",
    [
        {"flags": {}},
        {"flags": {FRACTION: 0.8, "max-total-tokens": 9000}},
        {"numbers": {"wanted_tokens": 1e6}},
    ],
)
def test_a_request_that_cannot_fit_the_kv_pool_stops(more: dict[str, Any]) -> None:
    numbers = {"kv_tokens": 9000, "wanted_tokens": 10000} | more.get("numbers", {})
    one = death("kv_too_small", numbers=numbers, flags=more.get("flags", {FRACTION: 0.8}))
    verdict = decide([one], 8)
    assert verdict.action == "stop"
    assert f"holds {numbers['kv_tokens']:.0f}" in verdict.why


def test_out_of_memory_while_loading_waits_for_others_and_else_stops() -> None:
    told = {"total_gib": 94.0, "free_gib": 1.0, "process_gib": 40.0}
    loading = {"phase": "start", "log_phase": "loading"}
    assert decide([death("gpu_oom", numbers=told, **loading)], 8).action == "wait"
    assert decide([death("gpu_oom", numbers=told | {"process_gib": 92.8}, **loading)], 8).action == "stop"
    assert decide([death("watchdog"), death("gpu_oom", 1, **loading)], 8).action == "wait", (
        "ours, not yet gone"
    )


def test_kv_slots_make_the_scheduler_careful_and_then_take_fewer() -> None:
    assert steps_of(death("kv_slots")) == {"schedule-conservativeness": 1.3}
    careful = death("kv_slots", flags={"schedule-conservativeness": 1.3}, in_flight=40)
    assert steps_of(careful) == {"max-running-requests": 30}


def test_the_hosts_memory_shrinks_the_hierarchical_cache_and_turns_it_off() -> None:
    def flags(**more: Any) -> dict[str, Any]:
        return HICACHE | {name.replace("_", "-"): value for name, value in more.items()}

    for name in ("host_memory", "killed_in_init"):
        assert steps_of(death(name, flags=flags(hicache_size=120))) == {"hicache-size": 60}
        assert steps_of(death(name, flags=flags())) == {"hicache-ratio": 1.5}
        off = steps_of(death(name, flags=flags(hicache_ratio=1.5)))
        assert off == {"enable-hierarchical-cache": None, "hicache-ratio": None}
        assert decide([death(name), death(name, 1)], 8).action == "stop"
    assert steps_of(death("killed"), death("killed", 1, flags=flags())) == {"hicache-ratio": 1.5}
