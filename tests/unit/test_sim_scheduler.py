"""The simulator's scheduler in virtual time: nothing here waits."""

from __future__ import annotations

import random

import pytest

from promptmill.sim.engine_config import EngineConfig
from promptmill.sim.radix import RadixCache, token_key
from promptmill.sim.request import Request
from promptmill.sim.scheduler import Engine


def _run(engine: Engine, max_steps: int = 1 << 30) -> tuple[float, int, list[Request], list[Request]]:
    """To the end: seconds, tokens produced, finished and retracted requests."""
    seconds, tokens, finished, retracted = 0.0, 0, [], []
    while engine.busy:
        step = engine.step(max_steps)
        assert step.kind != "idle"
        seconds, tokens = seconds + step.duration_s, tokens + step.tokens
        finished += step.finished
        retracted += step.retracted
    return seconds, tokens, finished, retracted


def test_virtual_time_conserves_tokens_and_memory() -> None:
    rng = random.Random(1)
    engine = Engine(EngineConfig(kv_tokens=16_000, conservativeness=0.02))
    lengths = {}
    for number in range(400):
        length = min(int(rng.expovariate(1 / 800)) + 1, 4000)
        lengths[f"r{number}"] = length
        prompt = rng.randrange(20, 2500)
        family = f"f{number % 5}" if number % 2 else ""
        engine.add(Request.counted(f"r{number}", prompt, length, 4000, family, 300))
    _, tokens, finished, retracted = _run(engine)
    assert retracted
    assert {request.rid: request.output_tokens for request in finished} == lengths
    assert tokens == sum(lengths.values())
    assert sum(request.retractions for request in finished) == len(retracted)
    assert engine.pool.private_tokens == 0
    assert engine.pool.available_tokens == 16_000


def test_many_steps_at_once_take_as_long_as_one_by_one() -> None:
    runs = []
    for max_steps in (1, 7, 1 << 30):
        engine = Engine(EngineConfig(kv_tokens=6000))
        for number in range(30):
            engine.add(Request.counted(f"r{number}", 100 + number, 50 + 13 * number % 300, 400))
        seconds, tokens, finished, retracted = _run(engine, max_steps)
        order = [request.rid for request in finished]
        runs.append((pytest.approx(seconds), tokens, order, len(retracted)))
    assert runs[0] == runs[1] == runs[2]


def test_decode_stops_at_the_step_that_starts_before_a_moment() -> None:
    engine = Engine(EngineConfig(kv_tokens=100_000))
    engine.add(Request.counted("a", 10, 5000, 5000))
    engine.step()
    step = engine.step(1 << 30, until_s=1.0)
    assert 1.0 <= step.duration_s < 1.04
    assert engine.step(1 << 30, until_s=0.0).steps == 1


def test_a_saturated_server_retracts_and_raises_its_ratio() -> None:
    """The transcript: 1,500 KV tokens, conservativeness 0.1, 8 requests of 200 tokens."""
    engine = Engine(EngineConfig(kv_tokens=1500, context_tokens=2048, conservativeness=0.1))
    requests = [Request.counted(f"r{number}", 20, 200, 200) for number in range(8)]
    for request in requests:
        engine.add(request)
        if request is requests[3]:  # they arrive in two batches, as they did there
            engine.step()
    retractions = []
    while engine.busy:
        step = engine.step(1 << 30)
        if step.retracted:
            retractions.append(step)
    first = retractions[0]
    assert len(first.retracted) == 1
    assert first.ratio_before < 0.07
    assert first.ratio_after == pytest.approx(0.94, abs=0.01)
    assert first.gained_tokens == pytest.approx(168, abs=10)
    assert all(request.output_tokens == 200 for request in requests)
    assert [request.retractions for request in requests if request.retractions]


def test_retraction_takes_the_fewest_output_tokens_and_the_longest_prompt_first() -> None:
    engine = Engine(EngineConfig(kv_tokens=1000, conservativeness=0.01))
    for rid, prompt in (("short", 100), ("long", 300)):
        engine.add(Request.counted(rid, prompt, 298, 298))
    engine.step()
    assert engine.step(280).steps == 280
    engine.add(Request.counted("late", 2, 20, 20))
    retracted: list[Request] = []
    for _ in range(9):
        if retracted := engine.step(1 << 30).retracted:
            break
    assert [request.rid for request in retracted] == ["late", "long"]
    assert [request.rid for request in engine.waiting] == ["late", "long"]
    assert retracted[1].output_tokens > retracted[0].output_tokens > 0


def test_admission_reserves_and_then_waits_for_the_batch_to_shrink() -> None:
    engine = Engine(EngineConfig(kv_tokens=10_000))
    for number in range(4):
        engine.add(Request.counted(f"r{number}", 1000, 2000, 2000))
    engine.step()
    assert len(engine.running) == 3  # 3 × (1,000 + 2,000) fit below 10,000, a fourth does not
    for _ in range(50):
        assert engine.step().kind == "decode"
    engine.abort("r0")
    assert engine.step().kind == "prefill"


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    engine = Engine(EngineConfig(kv_tokens=100_000))
    engine.add(Request.counted("a", 20_000, 5, 10))
    steps = [engine.step() for _ in range(3)]
    assert [step.prefill_tokens for step in steps] == [8192, 8192, 3616]
    assert steps[0].duration_s == pytest.approx(0.05 + 8192 / 5000)
    assert [len(step.started) for step in steps] == [0, 0, 1]


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine(EngineConfig(kv_tokens=100_000))
    engine.add(Request.counted("a", 1000, 5, 10, "tools", 800))
    engine.step()
    engine.add(Request.counted("b", 1200, 5, 10, "tools", 800))
    step = engine.step()
    assert (step.cached_tokens, step.prefill_tokens) == (800, 400)


def test_max_new_tokens_is_clipped_to_the_context() -> None:
    engine = Engine(EngineConfig(kv_tokens=4096, context_tokens=2048))
    request = Request.counted("a", 2040, 7, 7)
    engine.add(request)
    _run(engine)
    assert request.finish is not None
    assert (request.finish.type, request.finish.length) == ("length", 6)


def test_a_full_queue_refuses() -> None:
    engine = Engine(EngineConfig(kv_tokens=1000, max_queued=1))
    assert engine.add(Request.counted("a", 10, 5, 5))
    assert not engine.add(Request.counted("b", 10, 5, 5))


def test_abort_matches_by_prefix_and_says_who_waited() -> None:
    engine = Engine(EngineConfig(kv_tokens=1000, max_running=2))
    for rid in ("p1", "p2", "p10"):
        engine.add(Request.counted(rid, 10, 50, 50))
    engine.step()
    messages = {request.rid: request.finish.message for request in engine.abort("p1") if request.finish}
    assert messages == {"p1": "Aborted", "p10": "Abort in waiting queue"}
    assert list(engine.running) == ["p2"]


def test_cache_evicts_the_least_recently_used_and_nothing_locked() -> None:
    cache = RadixCache()
    a, b, c = (token_key([first, *range(10)]) for first in (1, 2, 3))
    locked, _ = cache.insert(a)
    cache.lock(locked)
    cache.insert(b)
    cache.insert(c)
    cache.match(b)
    assert cache.evict(5) == 11
    assert [cache.match(key)[1] for key in (a, b, c)] == [11, 11, 0]
    assert cache.evict(100) == 11
    assert cache.total_tokens == 11
