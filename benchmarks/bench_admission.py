"""What the admission policy reaches on a simulated server, against what it is meant to. In virtual time.

    .venv/bin/python benchmarks/bench_admission.py [--quick]

Prints one JSON object, after a minute of CPU. Each figure stands beside its goal and what the study that
set the goals reached; `server flag` is the server's --schedule-conservativeness. The goals hold for 0.3,
which the profiles set and the study's figures were reached with; 1 is SGLang's default. --quick leaves that
out, and the fixed number on four servers. A makespan is given over a lower bound that no policy gets below,
and is the worst of the seeds; a seed shuffles the prompts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.admission import read_workload
from promptmill.planning.simulation import FixedPools, Outcome, Simulation, Work, fixed_number, lower_bound_s

KV_TOKENS = (116_000, 159_000, 376_000)
SMALL, LARGE = 116_000, 376_000
UNEVEN = (376_000, 376_000, 159_000, 116_000)
SEEDS = range(3)
PROFILE_FLAG = 0.3
PROMPTS, DELTA, UNEVEN_PROMPTS = 4_400, 880, 8_800
QUICK = "--quick" in sys.argv
POISON = ("p500", "p1500", "p3000")
works = cache(read_workload)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `reference` is what the study reached."""

    what: str
    value: float
    goal: float
    reference: str
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def main() -> None:
    started = time.process_time()
    result: dict[str, Any] = {"benchmark": "admission", "load": os.getloadavg(), "server flag": {}}
    for flag in (PROFILE_FLAG,) if QUICK else (PROFILE_FLAG, 1.0):
        result["server flag"][flag] = [_json(figure) for row in ROWS for figure in row(flag)]
    result["fixed pools / bound"] = fixed_pools()
    result["fixed 500 / this"] = fixed_500()
    result["cpu_s"] = round(time.process_time() - started)
    print(json.dumps(result, indent=1))


def whole_runs(flag: float) -> list[Figure]:
    """4,400 prompts on one server, at three sizes of its KV cache."""
    works_ = works(PROMPTS)
    figures, outcomes = [], []
    for kv, goal, reference in zip(KV_TOKENS, (1.12, 1.10, 1.07), ("1.091", "1.073", "1.047"), strict=True):
        runs = [Simulation(works_, [kv], seed=seed, conservativeness=flag).run() for seed in SEEDS]
        outcomes += runs
        figures.append(Figure(f"makespan, {kv:,} KV tokens", _worst(works_, [kv], runs), goal, reference))
    least = min(share for run in outcomes for share in run.half_way.values())
    return [
        *figures,
        Figure("mean server queue", max(run.mean_queue for run in outcomes), 15, "6-11"),
        Figure("timeouts", sum(run.timeouts for run in outcomes), 0, "0"),
        Figure(
            "generated tokens lost outside crashes", sum(abs(run.lost_tokens) for run in outcomes), 0, "0"
        ),
        Figure("at half of all prompts, least share of a partition", least, 0.40, "0.46-0.48", at_least=True),
    ]


def small_delta(flag: float) -> list[Figure]:
    """880 prompts, as a night brings; and what fixed pools take for them, in the mean of the seeds."""
    works_ = works(DELTA)
    runs = [Simulation(works_, [LARGE], seed=seed, conservativeness=flag).run() for seed in SEEDS]
    pools = Simulation(works_, [LARGE], pools=FixedPools(), conservativeness=flag).run()
    ratio = pools.makespan_s / mean(run.makespan_s for run in runs)
    return [
        Figure("makespan of 880 prompts", _worst(works_, [LARGE], runs), 1.20, "1.15"),
        Figure("880 prompts, fixed pools / this", ratio, 1.15, "1.22", at_least=True),
    ]


def without_samples(flag: float) -> list[Figure]:
    """No poll is ever answered: capacity and the mean size of a request decide."""
    works_ = works(PROMPTS)
    return [
        Figure(
            f"makespan without load samples, {kv:,} KV tokens",
            _worst(works_, [kv], [Simulation(works_, [kv], samples=False, conservativeness=flag).run()]),
            goal,
            reference,
        )
        for kv, goal, reference in zip(
            KV_TOKENS, (1.15, 1.13, 1.09), ("1.121", "1.098", "1.062"), strict=True
        )
    ]


def relaunches(flag: float) -> list[Figure]:
    """The server dies twice, and comes back smaller, then larger again."""
    lives = [(4_000.0, SMALL), (9_000.0, LARGE)]
    run = Simulation(works(PROMPTS), [LARGE], relaunches=lives, conservativeness=flag).run()
    assert len(run.filled_s) == 3, "a life that never filled"
    what = "s from ready to 80 % of the KV cache"
    return [
        Figure(f"376K -> 116K, {what}", run.filled_s[1], 180, "62"),
        Figure(f"116K -> 376K, {what}", run.filled_s[2], 180, "108"),
        Figure("timeouts, with relaunches", run.timeouts, 0, "0"),
        Figure("generated tokens lost outside those crashes", abs(run.lost_tokens), 0, "0"),
    ]


def poison(flag: float) -> list[Figure]:
    """Three prompts that end the server whenever they are prefilled."""
    run = Simulation(works(PROMPTS), [LARGE], poison=POISON, conservativeness=flag).run()
    found = len(run.quarantined.intersection(POISON))
    return [
        Figure("of 3 poison prompts: quarantined", found, 3, "3", at_least=True),
        Figure("... innocents failed", len(run.quarantined) - found, 0, "0"),
        Figure("... crashes of each", max(run.crashes.values()), 3, "2"),
    ]


def uneven(flag: float) -> list[Figure]:
    """8,800 prompts on four servers at once."""
    works_ = works(UNEVEN_PROMPTS)
    run = Simulation(works_, UNEVEN, conservativeness=flag).run()
    return [Figure("makespan, 4 uneven servers", _worst(works_, UNEVEN, [run]), 1.12, "1.084")]


ROWS: tuple[Callable[[float], list[Figure]], ...] = (
    whole_runs,
    small_delta,
    without_samples,
    relaunches,
    poison,
    uneven,
)


def fixed_pools() -> dict[str, dict[str, float]]:
    """150 short and 32 long at 376K KV tokens and the server's default flag, by which partitions are long."""
    longs = {
        "B3, B4 long, as in the profiles": ("B3_agent", "B4_deepseek"),
        "B2, B4 long, as their answers are": ("B2_opencodeinstruct", "B4_deepseek"),
    }
    return {
        name: {
            f"{n} prompts": round(_pools(n, FixedPools(long_partitions=long)), 3) for n in (DELTA, PROMPTS)
        }
        for name, long in longs.items()
    }


def _pools(prompts: int, pools: FixedPools) -> float:
    run = Simulation(works(prompts), [LARGE], pools=pools, conservativeness=1.0).run()
    return _worst(works(prompts), [LARGE], [run])


def fixed_500() -> dict[str, dict[str, float]]:
    """500 in flight on every server, with the flag of the profiles: its time over that of the window."""
    places: dict[str, tuple[int, tuple[int, ...], range]] = {
        f"{DELTA} prompts": (DELTA, (LARGE,), SEEDS),
        f"{PROMPTS} prompts": (PROMPTS, (LARGE,), SEEDS),
        f"{UNEVEN_PROMPTS} prompts, 4 uneven servers": (UNEVEN_PROMPTS, UNEVEN, range(1)),
    }
    result = {}
    for place, (prompts, servers, seeds) in places.items():
        if QUICK and len(servers) > 1:
            continue
        by_hand, ordered = fixed_number(500, ordered=False), fixed_number(500, ordered=True)
        hand = Simulation(works(prompts), servers, pools=by_hand).run()
        window, number = (
            [Simulation(works(prompts), servers, seed=seed, pools=pools).run() for seed in seeds]
            for pools in (None, ordered)
        )
        ours = mean(run.makespan_s for run in window)
        result[place] = {
            "in input order": round(hand.makespan_s / ours, 3),
            "in the window's order": round(mean(run.makespan_s for run in number) / ours, 3),
            "requests queued on a server": round(mean(run.mean_queue for run in number)),
        }
    return result


def _worst(works_: list[Work], servers: tuple[int, ...] | list[int], runs: list[Outcome]) -> float:
    """Makespan over the bound."""
    return max(run.makespan_s for run in runs) / lower_bound_s(works_, servers)


def _json(figure: Figure) -> dict[str, Any]:
    data = asdict(figure) | {"value": round(figure.value, 3), "reached": figure.reached}
    data["goal"] = f"{'>=' if data.pop('at_least') else '<='} {figure.goal:g}"
    return data


if __name__ == "__main__":
    main()
