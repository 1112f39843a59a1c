"""Pace, what is left, and when a run ends by the clock."""

from __future__ import annotations

from datetime import datetime

import pytest

from promptmill.events import duration
from promptmill.generation.deadline import end_of_run
from promptmill.generation.figures import Counter, Meter
from promptmill.generation.forecast import Lengths
from promptmill.settings import RunSettings


def test_meter_counts_tokens_of_the_last_seconds_only() -> None:
    meter = Meter({"a": Counter(total=10, done=0)})
    meter.figures(now=0.0)
    meter.counters["a"].tokens = 1000
    assert meter.figures(now=10.0).tokens_per_s == 100.0
    assert meter.figures(now=40.0).tokens_per_s == 0.0


def test_meter_counts_answers_and_what_was_saved() -> None:
    meter = Meter({"a": Counter(total=10, done=0)})
    meter.forecast.lengths["a"] = Lengths(cap=64, prompt_mean=10)
    meter.figures(now=0.0)
    meter.sent("a", 10, 0)
    meter.sent("a", 10, 5)
    meter.received("a", 8, 15)
    meter.ended("a", failed=False, turns_left=0)
    figures = meter.figures(now=4.0, gpus=2)
    assert (figures.tokens_per_s, figures.answers_per_s) == (2.0, 0.25)
    assert (figures.resumed_tokens, figures.refilled_tokens) == (5, 15)
    assert figures.tokens_per_gpu_hour == 3600


def test_meter_takes_away_the_turns_that_will_not_be_asked() -> None:
    meter = Meter({"a": Counter(total=4, done=0)})
    meter.ended("a", failed=False, turns_left=3)
    assert (meter.counters["a"].total, meter.counters["a"].left) == (1, 0)


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({}, None),
        ({"max_hours": 1.5}, datetime(2026, 11, 30, 23, 30)),
        ({"stop_at": "23:00"}, datetime(2026, 11, 30, 23, 0)),
        ({"stop_at": "07:00"}, datetime(2026, 12, 1, 7, 0)),
        ({"stop_at": "22:00"}, datetime(2026, 12, 1, 22, 0)),
        ({"stop_at": "07:00", "max_hours": 10}, datetime(2026, 12, 1, 7, 0)),
        ({"stop_at": "07:00", "max_hours": 8}, datetime(2026, 12, 1, 6, 0)),
    ],
)
def test_end_of_run_is_the_earlier_of_both(settings: dict[str, object], end: datetime | None) -> None:
    assert end_of_run(RunSettings.model_validate(settings), datetime(2026, 11, 30, 22, 0)) == end


@pytest.mark.parametrize(("seconds", "text"), [(42, "42 s"), (100, "2 min"), (7500, "2 h 05 min")])
def test_duration_is_said_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text
