"""Window, picker, suspects and order together, on the simulator's scheduler in virtual time.

The goals are those of `benchmarks/bench_admission.py`, which prints the figures. Virtual time knows no
machine, so that they are asserted as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.admission import read_workload
from benchmarks.bench_admission import PROFILE_FLAG, ROWS, Figure
from promptmill.planning.simulation import Simulation, Work, lower_bound_s


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_admission_reaches_its_goals(row: Callable[[float], list[Figure]]) -> None:
    missed = [figure for figure in row(PROFILE_FLAG) if not figure.reached]
    assert not missed


def test_simulated_run_is_the_same_each_time() -> None:
    works = read_workload(300)
    runs = [Simulation(works, [116_000], seed=seed).run() for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].makespan_s != runs[2].makespan_s


def test_simulated_run_loses_in_a_crash_what_was_in_flight_and_answers_all() -> None:
    works = read_workload(300)
    run = Simulation(works, [116_000], relaunches=[(500.0, 376_000)]).run()
    assert run.answered.total() == 300
    assert 0 < run.lost_in_crashes_tokens < 116_000
    assert run.lost_tokens == 0


def test_lower_bound_counts_a_shared_prefix_once_and_adds_servers_up() -> None:
    alone = Work("a", "A", "", 0, 1_000, 4_096, 2_000)
    shared = Work("b", "A", "tools", 900, 1_000, 4_096, 2_000)
    assert lower_bound_s([shared] * 90, [9_000]) < lower_bound_s([alone] * 90, [9_000])
    one, two = lower_bound_s([alone] * 90, [9_000]), lower_bound_s([alone] * 90, [9_000, 9_000])
    assert two == pytest.approx(one / 2)
