"""How far the forecast is from the end, in virtual time: the mill's own class on the simulator's scheduler.

    .venv/bin/python benchmarks/bench_forecast.py [--quick]

Prints one JSON object: by the server's KV tokens, and by the share of 88,000 prompts that was answered, how
much the forecast end is off, as a share of the whole time. About a minute and a half of CPU; --quick takes
17,600 prompts, and a fifth of that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.admission import read_workload
from promptmill.generation.forecast import Forecast, Lengths
from promptmill.planning.simulation import Server, Simulation, Work
from promptmill.sim.request import Request
from promptmill.sim.scheduler import Engine
from promptmill.types import Prompt

SHARES = (0.01, 0.02, 0.05, 0.2, 0.5, 0.8)


class Foretold(Simulation):
    """A run in which the end is forecast when so many prompts are answered."""

    def __init__(self, works: list[Work], kv_tokens: int, shares: Iterable[float]) -> None:
        super().__init__(works, [kv_tokens])
        self._forecast = Forecast()
        self._seen: dict[str, int] = {}
        self._asked_at = [(share, share * len(works)) for share in shares]
        self._ends: list[tuple[float, float | None]] = []
        for partition, total in self._totals.items():
            mine = [work for work in works if work.partition == partition]
            mean = sum(work.prompt_tokens for work in mine) / total
            self._forecast.lengths[partition] = Lengths(mine[0].max_new_tokens, mean)

    def errors(self) -> dict[float, float | None]:
        """By share answered: forecast end against real end, or None where nothing was said."""
        real = self.run().makespan_s
        return {share: end and round(end / real - 1, 3) for share, end in self._ends}

    def _send(self, prompt: Prompt, server: Server, now: float) -> None:
        super()._send(prompt, server, now)
        work = self._works[prompt.prompt_hash]
        self._seen[work.hash] = 0
        self._forecast.begun(work.partition, work.prompt_tokens, work.prompt_tokens)

    def _left(self, server: Server, rid: str) -> None:
        work = self._works[rid]
        self._note(work, server.in_flight[rid])
        self._forecast.left(work.partition, work.prompt_tokens + self._seen.pop(rid))
        super()._left(server, rid)

    def _answered(self, server: Server, request: Request) -> None:
        super()._answered(server, request)
        work, answered = self._works[request.rid], self.outcome.answered
        truncated = request.output_tokens >= work.max_new_tokens
        self._forecast.finished(work.partition, request.output_tokens, truncated)
        while self._asked_at and answered.total() >= self._asked_at[0][1]:
            waiting = {
                name: total - answered[name] - self._forecast.lengths[name].under_way
                for name, total in self._totals.items()
            }
            left = self._forecast.seconds_left(waiting)
            self._ends.append((self._asked_at.pop(0)[0], left and server.at + left))

    def _poll(self, server: Server, engine: Engine) -> None:
        super()._poll(server, engine)
        for rid, request in server.in_flight.items():
            self._note(self._works[rid], request)
        self._forecast.sample(server.at)

    def _note(self, work: Work, request: Request) -> None:
        """A stream's tokens, as they come in groups."""
        seen, now = self._seen[work.hash], request.output_tokens
        if now > seen:
            self._forecast.produced(work.partition, now - seen, work.prompt_tokens + seen)
            self._seen[work.hash] = now


def many(works: list[Work], times: int) -> list[Work]:
    """The same workload again and again, its families apart."""
    return [
        replace(work, hash=f"{work.hash}-{n}", family=work.family and f"{work.family}-{n}")
        for n in range(times)
        for work in works
    ]


def main() -> None:
    works = many(read_workload(8800), 2 if "--quick" in sys.argv else 10)
    off = {kv: Foretold(works, kv, SHARES).errors() for kv in (116_000, 159_000, 376_000)}
    print(json.dumps({"benchmark": "forecast", "prompts": len(works), "off": off}, indent=1))


if __name__ == "__main__":
    main()
