"""When it will be over."""

from __future__ import annotations

import pytest

from benchmarks.admission import read_workload
from benchmarks.bench_forecast import Foretold
from promptmill.generation.forecast import Forecast, Lengths

GOAL = 0.15


@pytest.mark.parametrize("kv_tokens", [116_000, 376_000])
def test_forecast_is_near_once_answers_are_many_for_what_is_under_way(kv_tokens: int) -> None:
    """2 % of 88,000 prompts are as many answers as 20 % of these; bench_forecast.py runs those."""
    errors = Foretold(read_workload(8800), kv_tokens, (0.2, 0.5, 0.8)).errors()
    assert all(error is not None and abs(error) <= GOAL for error in errors.values()), errors


def steady(seconds: int) -> Forecast:
    """Ten requests at a time, each of 100 prompt and 100 output tokens, in 10 s."""
    forecast = Forecast()
    forecast.lengths["a"] = Lengths(cap=1000, prompt_mean=100)
    for second in range(seconds):
        for slot in range(10):
            context = 100 + 10 * (second % 10)
            if second % 10 == 0:
                forecast.begun("a", 100, 100)
            forecast.produced("a", 10, context)
            if second % 10 == 9:
                forecast.left("a", 200)
                forecast.finished("a", 100, truncated=False)
            assert slot < 10
        forecast.sample(float(second + 1))
    return forecast


def test_forecast_of_a_steady_run_is_what_is_left_at_its_pace() -> None:
    assert steady(100).seconds_left({"a": 50}) == pytest.approx(50, rel=0.02)


def test_forecast_says_nothing_before_there_are_answers() -> None:
    assert Forecast().seconds_left({}) is None
    assert steady(5).seconds_left({"a": 50}) is None


def test_forecast_after_a_pause_begins_anew() -> None:
    forecast = steady(100)
    forecast.pause()
    assert forecast.seconds_left({"a": 50}) is None


def test_truncated_answers_are_no_ends() -> None:
    """Were they, the answers under way would be thought to end sooner."""
    short, long = steady(100), steady(100)
    long.lengths["a"].ended -= 50
    for forecast in (short, long):
        forecast.begun("a", 100, 100)
    assert (long.seconds_left({"a": 0}) or 0) > (short.seconds_left({"a": 0}) or 0)
