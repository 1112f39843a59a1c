"""A run in virtual time: the mill's own policy classes on the simulator's scheduler.

It stands where mill and replica stand in a real run, without their sockets and tasks: it keeps windows full,
tells them the load every 5 s, and takes a server's death as the mill does. The policy itself is imported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from promptmill.generation.order import family_of, in_families
from promptmill.generation.picker import Picker
from promptmill.generation.suspects import Suspects
from promptmill.generation.window import RequestSizes, Window
from promptmill.serving.client import Load
from promptmill.serving.liveness import Limits, Liveness
from promptmill.sim.engine_config import EngineConfig
from promptmill.sim.request import Request, Step
from promptmill.sim.scheduler import Engine
from promptmill.types import Prompt, PromptRow

POLL_S = 5.0
RELAUNCH_S = 300.0
_LIMITS = Limits(inactivity_timeout_s=600, collapse_timeout_s=600)
_NO_BOUND = 1 << 30


@dataclass(frozen=True, slots=True)
class Work:
    """One request."""

    hash: str
    partition: str
    family: str
    shared_tokens: int
    prompt_tokens: int
    max_new_tokens: int
    output_tokens: int

    def prompt(self) -> Prompt:
        """As the mill knows it, but for the ids, of which only the number matters."""
        system = [{"role": "system", "content": self.family}] if self.family else []
        row = PromptRow(0, self.hash, "", [[*system, {"role": "user", "content": ""}]], None, [], [])
        return Prompt(self.hash, self.partition, [], 0, 0, self.max_new_tokens, row, [])

    def request(self) -> Request:
        return Request.counted(
            self.hash, self.prompt_tokens, self.output_tokens, self.max_new_tokens,
            self.family, self.shared_tokens,
        )  # fmt: skip


def lower_bound_s(works: Iterable[Work], servers: Iterable[int]) -> float:
    """No policy ends sooner on a server of so many KV tokens.

    Of several servers each is taken at the pace that it has for all of `works`; that is no strict bound.
    """
    return 1 / sum(1 / _bound_of_one(list(works), EngineConfig(kv_tokens=kv)) for kv in servers)


def _bound_of_one(works: list[Work], config: EngineConfig) -> float:
    kv_steps = sum(w.prompt_tokens * w.output_tokens + w.output_tokens**2 / 2 for w in works)
    shared = sum(w.shared_tokens * w.output_tokens for w in works)
    steps = max((kv_steps - shared) / config.kv_tokens, max(w.output_tokens for w in works))
    prefilled = sum(w.prompt_tokens - w.shared_tokens for w in works)
    return (
        config.step_s * steps
        + config.per_running_s * sum(w.output_tokens for w in works)
        + config.per_kv_token_s * kv_steps
        + prefilled / config.prefill_tokens_per_s
    )


class _Window(Protocol):
    def sample(self, now: float, running: int, queued: int, in_flight: int) -> None: ...
    def size(self, now: float) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedPools:
    """What the run was done with by hand: so many of short and of long partitions, in input order."""

    short: int = 150
    long: int = 32
    long_partitions: tuple[str, ...] = ("B3_agent", "B4_deepseek")
    ordered: bool = False
    """In the mill's own order instead, so that nothing but the numbers is by hand."""

    def sample(self, now: float, running: int, queued: int, in_flight: int) -> None: ...

    def size(self, now: float) -> int:
        return self.short + self.long


def fixed_number(requests: int, *, ordered: bool) -> FixedPools:
    """So many of whatever there is, on every server."""
    return FixedPools(requests, 0, (), ordered)


@dataclass(slots=True)
class Outcome:
    """What a run came to; times in virtual seconds."""

    makespan_s: float = 0.0
    sent_s: float = 0.0
    """When the last prompt went out; from then on the servers run empty."""
    queue_s: float = 0.0
    """Queued requests of a server, summed over its time."""
    up_s: float = 0.0
    timeouts: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    """By partition."""
    half_way: dict[str, float] = field(default_factory=dict)
    """Share of each partition that was answered when half of all prompts were."""
    produced_tokens: int = 0
    answered_tokens: int = 0
    lost_in_crashes_tokens: int = 0
    filled_s: list[float] = field(default_factory=list)
    """From each life's readiness until 80 % of its KV tokens were in use."""
    quarantined: set[str] = field(default_factory=set)
    crashes: Counter[str] = field(default_factory=Counter)
    """Lives ended by each poisonous prompt."""
    mean_outputs: dict[str, float] = field(default_factory=dict)

    @property
    def mean_queue(self) -> float:
        return self.queue_s / self.up_s

    @property
    def lost_tokens(self) -> int:
        """Generated for nothing, crashes apart."""
        return self.produced_tokens - self.answered_tokens - self.lost_in_crashes_tokens


@dataclass(slots=True)
class Server:
    lives: list[int]
    """KV tokens of each life to come."""
    deaths_s: list[float]
    at: float = 0.0
    """Its own clock: the end of the step that is under way."""
    ready_at: float = 0.0
    poll_at: float = math.inf
    engine: Engine | None = None
    window: _Window | None = None
    liveness: Liveness | None = None
    step: Step | None = None
    in_flight: dict[str, Request] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """In flight, without a first token."""
    filled: bool = False

    def fill(self) -> float:
        """Share of the window in use; 1 and more where it is full or down."""
        return len(self.in_flight) / self.window.size(self.at) if self.window else math.inf


class Simulation:
    """One run of `works` on servers of so many KV tokens each; `run` it once."""

    def __init__(
        self,
        works: list[Work],
        servers: Iterable[int],
        *,
        seed: int = 0,
        conservativeness: float = 0.3,
        samples: bool = True,
        pools: FixedPools | None = None,
        mean_outputs: dict[str, float] | None = None,
        relaunches: Iterable[tuple[float, int]] = (),
        poison: Iterable[str] = (),
    ) -> None:
        """`relaunches`: when the (only) server dies, and the KV tokens that it comes back with.

        Without `samples` no poll is answered. A server that holds a `poison` prompt dies of its prefill.
        """
        self._works = {work.hash: work for work in works}
        self._conservativeness = conservativeness
        self._samples = samples
        self._pools = pools
        self._by_hand = pools is not None and not pools.ordered
        self._poison = frozenset(poison)
        deaths = [*relaunches]
        self._servers = [Server([kv, *(kv for _, kv in deaths)], [at for at, _ in deaths]) for kv in servers]
        self._sizes = RequestSizes()
        self._suspects = Suspects()
        self._picker = Picker(mean_outputs)
        self._in_class: Counter[str] = Counter()
        self._totals = Counter(work.partition for work in works)
        self.outcome = Outcome()
        for partition, total in self._totals.items():
            fresh = self._fresh(partition, seed)
            self._picker.add(partition, fresh, total, self._class(partition), self._cap(partition))

    def run(self) -> Outcome:
        out = self.outcome
        while out.answered.total() + len(out.quarantined) < len(self._works):
            self._turn(min(self._servers, key=lambda server: server.at))
        out.makespan_s = max(server.at for server in self._servers if not server.in_flight)
        out.mean_outputs = self._picker.mean_outputs()
        return out

    def _turn(self, server: Server) -> None:
        if server.engine is None:
            self._start(server)
        elif server.step is not None:
            self._absorb(server, server.step)
        if server.deaths_s and server.at >= server.deaths_s[0]:
            server.deaths_s.pop(0)
            self._die(server)
        if server.engine is not None and server.at >= server.poll_at:
            self._poll(server, server.engine)
        self._dispatch(server.at)
        if server.engine is not None:
            self._step(server, server.engine)

    def _step(self, server: Server, engine: Engine) -> None:
        """Begin the next step; what it brings is seen when it is over."""
        until = min([server.poll_at, *server.deaths_s[:1]])
        server.step = None
        if not engine.busy:
            server.at = until
            return
        queued = len(engine.waiting)
        server.step = engine.step(_NO_BOUND, max(0.0, until - server.at))
        server.at += server.step.duration_s
        self.outcome.queue_s += queued * server.step.duration_s
        self.outcome.up_s += server.step.duration_s

    # --- what the mill does

    def _fresh(self, partition: str, seed: int) -> Iterator[Prompt]:
        prompts = (work.prompt() for work in self._works.values() if work.partition == partition)
        if self._by_hand:
            return prompts
        return in_families(prompts, _family, self._prompt_tokens, f"{partition} {seed}")

    def _dispatch(self, now: float) -> None:
        while (server := min(self._servers, key=Server.fill)).fill() < 1:
            prompt = (
                self._suspects.next()
                if self._suspects
                else self._picker.pick(self._in_class.__getitem__, lambda _: False)
            )
            if prompt is None:
                return
            self._send(prompt, server, now)

    def _send(self, prompt: Prompt, server: Server, now: float) -> None:
        assert server.engine is not None
        assert server.liveness is not None
        if server.step is None:  # it was idle
            server.at = now
        self.outcome.sent_s = server.at
        request = self._works[prompt.prompt_hash].request()
        server.engine.add(request)
        server.in_flight[request.rid] = request
        server.silent.add(request.rid)
        server.liveness.sent(now)
        self._in_class[self._class(prompt.partition)] += 1

    def _left(self, server: Server, rid: str) -> None:
        assert server.liveness is not None
        del server.in_flight[rid]
        server.silent.discard(rid)
        server.liveness.ended()
        self._in_class[self._class(self._works[rid].partition)] -= 1

    def _absorb(self, server: Server, step: Step) -> None:
        """What a step brought, at its end."""
        assert server.engine is not None
        assert server.liveness is not None
        out = self.outcome
        out.produced_tokens += step.tokens
        if guilty := self._poison & {request.rid for request in step.started}:
            out.crashes.update(guilty)
            server.lives.insert(0, server.engine.config.kv_tokens)
            self._die(server)
            return
        server.liveness.tokens(step.tokens, server.at)
        for request in step.started:
            server.silent.discard(request.rid)
            self._suspects.cleared(request.rid)
        for request in step.finished:
            self._answered(server, request)
        if not server.filled and step.used_tokens >= 0.8 * server.engine.config.kv_tokens:
            server.filled = True
            out.filled_s.append(server.at - server.ready_at)

    def _answered(self, server: Server, request: Request) -> None:
        out, work = self.outcome, self._works[request.rid]
        self._left(server, request.rid)
        if not self._by_hand:  # no lengths are known there
            self._picker.finished(work.partition, request.output_tokens)
        self._sizes.finished(work.prompt_tokens, request.output_tokens)
        out.answered_tokens += request.output_tokens
        out.answered[work.partition] += 1
        if out.answered.total() == len(self._works) // 2:
            out.half_way = {name: out.answered[name] / total for name, total in self._totals.items()}

    def _poll(self, server: Server, engine: Engine) -> None:
        assert server.window is not None
        assert server.liveness is not None
        server.poll_at = server.at + POLL_S
        running = len(engine.running) + (engine.chunked is not None)
        if self._samples:
            server.window.sample(server.at, running, len(engine.waiting), len(server.in_flight))
            load = Load(running, len(engine.waiting), engine.pool.used_tokens)
            server.liveness.polled(load, server.at)
        self.outcome.timeouts += server.liveness.loss(server.at) is not None

    def _die(self, server: Server) -> None:
        silent = []
        for rid, request in list(server.in_flight.items()):
            self.outcome.lost_in_crashes_tokens += request.output_tokens
            prompt = self._works[rid].prompt()
            if rid in server.silent:
                silent.append(prompt)
            else:
                self._picker.put_ahead(prompt)
            self._left(server, rid)
        if guilty := self._suspects.died(silent):
            self.outcome.quarantined.add(guilty.prompt_hash)
        server.engine = server.window = server.liveness = server.step = None
        server.at += RELAUNCH_S

    def _start(self, server: Server) -> None:
        config = EngineConfig(kv_tokens=server.lives.pop(0), conservativeness=self._conservativeness)
        server.engine = Engine(config)
        server.window = self._pools or Window(config.kv_tokens, None, self._sizes, server.at)
        server.liveness = Liveness(_LIMITS, server.at)
        server.ready_at, server.poll_at = server.at, server.at + POLL_S
        server.filled = False

    def _class(self, partition: str) -> str:
        return "long" if self._pools and partition in self._pools.long_partitions else "short"

    def _cap(self, partition: str) -> int | None:
        if not self._pools or not self._pools.long_partitions:
            return None
        return self._pools.long if self._class(partition) == "long" else self._pools.short

    def _prompt_tokens(self, prompt: Prompt) -> int:
        return self._works[prompt.prompt_hash].prompt_tokens


def _family(prompt: Prompt) -> bytes | None:
    return family_of(prompt.row)
