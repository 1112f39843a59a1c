"""The simulator's model of GPU memory, against the figures of the Kimi-K2.5 runs."""

from __future__ import annotations

from typing import Any

import pytest

from promptmill.sim import flags
from promptmill.sim.memory import NotEnoughMemory, Plan, memory_of, plan_memory
from promptmill.sim.server import _resolve


def _plan(*given: str) -> Plan:
    args, sim = flags.parse(["--model-path", "kimi", *given])
    memory = memory_of(sim, args["device"])
    _resolve(args, memory.is_gpu)
    return plan_memory(memory, args)


@pytest.mark.parametrize(
    ("fraction", "dtype", "kv_tokens", "headroom"),
    [("0.88", "auto", 159_000, 5.47), ("0.93", "auto", None, 0.82), ("0.90", "fp8_e4m3", 376_029, 3.52)],
)
def test_memory_gives_the_figures_of_the_known_runs(
    fraction: str, dtype: str, kv_tokens: int | None, headroom: float
) -> None:
    plan = _plan("--sim-gpu", "kimi-96gb", "--mem-fraction-static", fraction, "--kv-cache-dtype", dtype)
    if kv_tokens is not None:
        assert plan.kv_tokens == pytest.approx(kv_tokens, rel=0.02)
    # The three known figures lie on no straight line: 0.1 GB is as near as one comes.
    assert plan.headroom_gib == pytest.approx(headroom, abs=0.1)


def test_memory_below_two_gib_of_headroom_fails_a_full_prefill_and_half_a_chunk_fits() -> None:
    plan = _plan("--sim-gpu", "kimi-96gb", "--mem-fraction-static", "0.925")
    assert not plan.full_prefill_fits(8192)
    assert plan.full_prefill_fits(4096)
    assert _plan("--sim-gpu", "kimi-96gb", "--mem-fraction-static", "0.90").full_prefill_fits(8192)


def test_memory_without_room_for_the_weights_names_the_fraction_that_has() -> None:
    with pytest.raises(NotEnoughMemory, match=r"Raise --mem-fraction-static above 0\.771 "):
        _plan("--sim-gpu", "kimi-96gb", "--mem-fraction-static", "0.7")


def test_memory_on_a_cpu_fails_by_fraction_only_without_max_total_tokens() -> None:
    tiny = ("--device", "cpu", "--mem-fraction-static", "0.00001")
    with pytest.raises(NotEnoughMemory, match="--mem-fraction-static=1e-05"):
        _plan(*tiny)
    assert _plan(*tiny, "--max-total-tokens", "4096").kv_tokens == 4096


def test_max_total_tokens_can_only_lower() -> None:
    given: Any = ("--sim-gpu", "kimi-96gb", "--mem-fraction-static", "0.88", "--max-total-tokens")
    assert _plan(*given, "116000").kv_tokens == 116_000
    assert _plan(*given, "999999999").kv_tokens == pytest.approx(159_000, rel=0.02)
