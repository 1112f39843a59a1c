"""What follows a server's death."""

from __future__ import annotations

import pytest

from promptmill.serving.remedies import Death, decide


def death(life: int = 0, cause: str = "killed by signal 9", answers: int = 0, **more) -> Death:
    server = f"promptmill-{life}"
    return Death(server, more.pop("phase", "serving"), cause.format(server=server), answers, **more)


def test_decide_relaunches_after_one_death() -> None:
    assert decide([death()], 8).relaunch


def test_decide_stops_at_once_where_a_relaunch_cannot_help() -> None:
    verdict = decide([death(permanent=True)], 8)
    assert not verdict.relaunch
    assert verdict.why


def test_decide_stops_after_three_identical_deaths_without_an_answer() -> None:
    same = [death(life, "{server}: exit status 1\nlog of life {server}") for life in range(3)]
    assert decide(same[:2], 8).relaunch
    verdict = decide(same, 8)
    assert not verdict.relaunch
    assert "3 lives" in verdict.why


@pytest.mark.parametrize(
    "deaths",
    [
        [death(0), death(1, answers=1), death(2)],
        [death(0), death(1, "out of memory"), death(2)],
        [death(0, phase="start"), death(1), death(2)],
        [death(0, answers=1), death(1), death(2)],
    ],
)
def test_decide_relaunches_where_the_last_three_differ_or_answered(deaths: list[Death]) -> None:
    assert decide(deaths, 8).relaunch


def test_decide_looks_at_the_last_three_only() -> None:
    assert not decide([death(0, answers=5), *(death(life) for life in range(1, 4))], 8).relaunch


def test_decide_counts_relaunches_and_names_the_setting() -> None:
    deaths = [death(life, answers=1) for life in range(4)]
    assert decide(deaths[:2], 2).relaunch
    verdict = decide(deaths[:3], 2)
    assert not verdict.relaunch
    assert "server.max_relaunches = 2" in verdict.why
    assert not decide(deaths[:1], 0).relaunch


@pytest.mark.parametrize("cause", ["", "{server}"])
def test_decide_takes_a_death_without_words(cause: str) -> None:
    assert not decide([death(life, cause) for life in range(3)], 8).relaunch
