"""How long a run would take: a sample of its requests, served in virtual time, and scaled up. Pure.

The simulated pace was fitted to Kimi-K2.5 on eight GPUs of 96 GB (159K KV tokens gave some 950 tokens/s at
first, then 600). Another model or other cards have another; what holds is how it changes with KV tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from promptmill.planning.simulation import Simulation, Work
from promptmill.planning.survey import Ints, Survey

SAMPLE = 2_000
_SAMPLE_PER_KV = 12 / 4_000
"""A dozen times what runs at once, at 4,000 KV tokens a request."""
_LARGEST_SAMPLE = 6_000
_BLOCK_ROWS = 32
"""Rows are sampled in blocks, so that families stay together."""
_SAID_NEXT_TOKENS = 60
NIGHT_HOURS = 8.0


@dataclass(frozen=True, slots=True)
class Servers:
    """What the requests are served on."""

    kv_tokens: int
    """Of each."""
    count: int
    conservativeness: float


@dataclass(frozen=True, slots=True)
class Estimate:
    kv_tokens: int
    """Of each server."""
    servers: int
    requests: int
    sampled: int
    hours: float
    """Of serving without a break; starts and relaunches are not in it."""
    output_tokens_per_s: float
    output_tokens: int

    def nights(self, night_hours: float) -> int:
        return math.ceil(self.hours / night_hours)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def longest_request(surveys: Sequence[Survey]) -> int:
    """Tokens of the longest prompt that is left, with the cap of its answer."""
    return max((_longest(s) + s.manifest.max_new_tokens for s in surveys if s.left.any()), default=0)


def estimate(surveys: Sequence[Survey], means: Mapping[str, float], servers: Servers) -> Estimate | None:
    """`means`: tokens of an answer by partition. None where the longest request does not fit."""
    requests = sum(int(survey.left.sum()) for survey in surveys)
    if longest_request(surveys) >= servers.kv_tokens:
        return None
    wanted = min(_LARGEST_SAMPLE, max(SAMPLE, int(servers.count * servers.kv_tokens * _SAMPLE_PER_KV)))
    share = min(1.0, wanted / requests) if requests else 1.0
    works = [work for survey in surveys for work in _sample(survey, share, means[survey.manifest.partition])]
    if not works:
        return Estimate(servers.kv_tokens, servers.count, 0, 0, 0.0, 0.0, 0)
    kv = [servers.kv_tokens] * servers.count
    run = Simulation(works, kv, conservativeness=servers.conservativeness, mean_outputs=dict(means)).run()
    scale = requests / len(works)
    seconds = run.sent_s * scale + run.makespan_s - run.sent_s  # the end, where servers run empty, comes once
    output = int(run.answered_tokens * scale)
    return Estimate(
        servers.kv_tokens, servers.count, requests, len(works), seconds / 3600, output / seconds, output
    )


def _sample(survey: Survey, share: float, mean: float) -> list[Work]:
    rows = _rows(survey, share)
    if not len(rows):
        return []
    name, cap = survey.manifest.partition, survey.manifest.max_new_tokens
    turns = [(row, n % int(survey.turns[row])) for row in rows.tolist() for n in range(int(survey.left[row]))]
    outputs = answer_lengths(len(turns), mean, cap)
    works = []
    for number, ((row, turn), output) in enumerate(zip(turns, outputs, strict=True)):
        family = int(survey.families[row])
        shared = int(survey.shared[family]) if family >= 0 else 0
        prompt = int(survey.tokens[row]) + turn * (int(mean) + _SAID_NEXT_TOKENS)
        named = f"{name}/{family}" if shared else ""
        works.append(Work(f"{name}/{number}", name, named, min(shared, prompt), prompt, cap, output))
    return works


def _rows(survey: Survey, share: float) -> Ints:
    """About that share of the rows with requests left, spread evenly over families and file."""
    pending = np.flatnonzero(survey.left > 0)
    order = pending[np.argsort(survey.families[pending], kind="stable")]
    blocks = math.ceil(len(order) / _BLOCK_ROWS)
    size = min(_BLOCK_ROWS, max(1, math.ceil(len(order) * share / blocks))) if blocks else 0
    wanted = math.ceil(len(order) * share / size) if size else 0
    if share >= 1 or wanted * size >= len(order):
        return pending
    starts = np.linspace(0, len(order) - size, wanted).astype(np.int64)
    return np.sort(order[np.unique(starts[:, None] + np.arange(size))])


def answer_lengths(count: int, mean: float, cap: int) -> list[int]:
    """So many lengths up to `cap`, with the same chance to end at every token, and that mean."""
    if mean >= cap:
        return [cap] * count
    low, high = 1e-9, 1.0
    for _ in range(60):  # (1 - e^(-rate cap)) / rate falls with the rate
        rate = math.sqrt(low * high)
        low, high = (rate, high) if -math.expm1(-rate * cap) / rate > mean else (low, rate)
    lengths = [max(1, min(cap, round(-math.log1p(-(n + 0.5) / count) / low))) for n in range(count)]
    random.Random(count).shuffle(lengths)
    return lengths


def _longest(survey: Survey) -> int:
    return int(survey.tokens[survey.left > 0].max())
