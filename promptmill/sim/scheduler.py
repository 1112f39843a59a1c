"""SGLang's scheduler as a pure discrete engine: no clock, no socket, no task.

`add` requests, call `step` and advance your own clock by its `duration_s`. Admission, the reservation of KV
tokens, chunked prefill, retraction and the prefix cache follow SGLang 0.5.23; the durations are a model
fitted to Kimi-K2.5 on eight GPUs of 96 GB.

A request without a `source` is only counted: it ends after a given number of tokens, and many decode steps
are made at once as long as nothing can change. That is what virtual-time tests use.
"""

from __future__ import annotations

import heapq
import math
from collections import deque

from promptmill.sim.admission import build_prefill
from promptmill.sim.engine_config import EngineConfig, steps_before
from promptmill.sim.pool import KvPool
from promptmill.sim.radix import TOKEN_BYTES
from promptmill.sim.request import Finish, Request, Step

_INIT_RATIO = 0.7
_MIN_RATIO_FACTOR = 0.14
_DECAY_STEPS = 600
_RETRACT_STEPS = 20
"""After a retraction this many decode steps must fit."""

OUT_OF_MEMORY = (
    "Out of memory even after retracting all other requests in the decode batch. "
    "Try to increase --mem-fraction-static or lower the request's max_new_tokens."
)


class Engine:
    """Waiting, running, KV tokens. The owner calls `step` for as long as `busy`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = KvPool(config.kv_tokens)
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.chunked: Request | None = None
        """The one request whose prefill takes another chunk."""
        self.decode_steps = 0
        self._init_ratio = min(_INIT_RATIO * config.conservativeness, 1.0)
        self._min_ratio = self._init_ratio * _MIN_RATIO_FACTOR
        self.ratio = self._init_ratio
        """Share of what running requests may still produce that admission keeps free."""
        self.full = False
        """One did not fit: nobody is admitted until the batch shrinks."""
        self._context_tokens = 0
        self._sourced = 0
        self._ends: list[tuple[int, int, Request]] = []
        self._serial = 0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self.chunked)

    def add(self, request: Request) -> bool:
        """Queue a request; its max_new_tokens is silently clipped to what fits. False: the queue is full."""
        limit = self.config.max_queued
        if limit is not None and len(self.waiting) >= limit:
            return False
        room = self.config.max_request_tokens - request.prompt_tokens - 1
        request.max_new_tokens = max(0, min(request.max_new_tokens, room))
        self.waiting.append(request)
        return True

    def abort(self, prefix: str = "") -> list[Request]:
        """End every request whose rid starts with `prefix` (all by default); returns them.

        Those that ran keep their output; those that waited say so in `finish`.
        """
        aborted = []
        for request in [r for r in self.waiting if r.rid.startswith(prefix)]:
            self.waiting.remove(request)
            request.finish = Finish("abort", message="Abort in waiting queue")
            aborted.append(request)
        if self.chunked and self.chunked.rid.startswith(prefix):
            request, self.chunked = self.chunked, None
            self._free(request, request.prefilled_tokens)
            request.finish = Finish("abort", message="Aborted")
            aborted.append(request)
        for request in [r for r in self.running.values() if r.rid.startswith(prefix)]:
            self._end(request, Finish("abort", message="Aborted"))
            aborted.append(request)
        return aborted

    def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while there is work."""
        if self.busy:
            return False
        self.pool.cache.clear()
        return True

    def step(self, max_steps: int = 1, until_s: float = math.inf) -> Step:
        """One prefill batch, or decode steps: at most `max_steps`, none that starts after `until_s`.

        Decode steps end early when a request ends or when memory runs out, so a result stands for one state.
        """
        step = Step()
        if build_prefill(self, step):
            self._prefill(step)
        elif self.running:
            if self.pool.available_tokens < len(self.running):
                self._retract(step)
            if self.running:
                self._decode(step, max_steps, until_s)
        elif not self.waiting:
            self.ratio, self.full = self._init_ratio, False
        step.used_tokens = self.pool.used_tokens
        return step

    # -- prefill --

    def _prefill(self, step: Step) -> None:
        step.kind = "prefill"
        step.running = len(self.running)
        step.prefill_tokens = sum(take for _, take in step.prefills)
        self.pool.take(step.prefill_tokens)
        step.duration_s = self.config.per_chunk_s + step.prefill_tokens / self.config.prefill_tokens_per_s
        for request, take in step.prefills:
            request.prefilled_tokens += take
            request.to_prefill_tokens -= take
            if request is not self.chunked:
                self._join(request, step)

    def _join(self, request: Request, step: Step) -> None:
        """Its prefill is done: the prompt goes into the prefix cache, the first token comes out."""
        if self.config.radix and request.key:
            key = request.cache_key()
            known = len(key) // TOKEN_BYTES
            self.pool.share(request, key, request.prefilled_tokens - (request.sequence_tokens - known))
        if request.max_new_tokens <= 0:  # a prompt to be scored only
            self._free(request, request.sequence_tokens - request.node_tokens)
            request.finish = Finish("length", length=0)
            step.finished.append(request)
            return
        request.base_tokens += 1
        request.joined_at = self.decode_steps
        request.engine = self
        self.running[request.rid] = request
        self._context_tokens += request.sequence_tokens
        step.tokens += 1
        step.started.append(request)
        if request.source is not None:
            self._sourced += 1
            finish = _advance(request)
        else:
            finish = request.counted_finish()
            if finish is None:
                self._serial += 1
                end = self.decode_steps + request.counted_end() - request.base_tokens
                heapq.heappush(self._ends, (end, self._serial, request))
        if finish is not None:
            self._end(request, finish)
            step.finished.append(request)

    # -- decode --

    def _decode(self, step: Step, max_steps: int, until_s: float) -> None:
        running = len(self.running)
        while self._ends and not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        count = min(max_steps, self.pool.available_tokens // running)
        if self._sourced:
            count = 1
        elif self._ends:
            count = min(count, self._ends[0][0] - self.decode_steps)
        fixed = self.config.step_s + self.config.per_running_s * running
        fixed += self.config.per_kv_token_s * self._context_tokens
        growth = self.config.per_kv_token_s * running / 2
        count = max(1, min(count, steps_before(until_s, fixed, growth)))
        step.kind, step.running, step.steps = "decode", running, count
        step.duration_s = fixed * count + growth * count * (count - 1)
        self.pool.take(running * count)
        self.decode_steps += count
        self._context_tokens += running * count
        step.tokens += running * count
        self.ratio = max(
            self._min_ratio, self.ratio - (self._init_ratio - self._min_ratio) / _DECAY_STEPS * count
        )
        if self._sourced:
            for request in list(self.running.values()):
                finish = _advance(request) if request.source else request.counted_finish()
                if finish is not None:
                    self._end(request, finish)
                    step.finished.append(request)
            return
        while self._ends and self._ends[0][0] <= self.decode_steps:
            entry = heapq.heappop(self._ends)
            if self._is_current(entry):
                self._end(entry[2], entry[2].counted_finish() or Finish("stop"))
                step.finished.append(entry[2])

    def _is_current(self, entry: tuple[int, int, Request]) -> bool:
        """Whether an entry of the heap still speaks of a running request (it may have been retracted)."""
        end, _, request = entry
        return (
            self.running.get(request.rid) is request
            and end == request.joined_at + request.counted_end() - request.base_tokens
        )

    def _retract(self, step: Step) -> None:
        """Send back requests, fewest output tokens first, until 20 decode steps of the others fit."""
        step.ratio_before, free_before = self.ratio, self.pool.free_tokens
        order = sorted(self.running.values(), key=lambda r: (r.output_tokens, -r.prompt_tokens), reverse=True)
        while len(order) > 1:
            request = order.pop()
            self._leave(request)
            request.retractions += 1
            self.waiting.append(request)
            step.retracted.append(request)
            if self.pool.available_tokens >= len(order) * _RETRACT_STEPS:
                break
        step.gained_tokens = self.pool.free_tokens - free_before
        if self.pool.available_tokens < len(order):
            self._end(order[0], Finish("abort", message=OUT_OF_MEMORY, status_code=500))
            step.finished.append(order[0])
            return
        decoded = sum(r.output_tokens for r in order)
        allowed = sum(r.max_new_tokens for r in order)
        self.ratio = min(1.0, (decoded + _RETRACT_STEPS * len(order)) / max(1, allowed))
        step.ratio_after = self.ratio

    # -- leaving --

    def _free(self, request: Request, private_tokens: int) -> None:
        self.pool.release(request, private_tokens)
        self.full = False

    def _leave(self, request: Request) -> None:
        """Out of the running batch; the output so far stays with the request."""
        del self.running[request.rid]
        self._context_tokens -= request.sequence_tokens
        self._sourced -= request.source is not None
        output = request.output_tokens
        request.engine, request.base_tokens = None, output
        self._free(request, request.prompt_tokens + output - 1 - request.node_tokens)

    def _end(self, request: Request, finish: Finish) -> None:
        if self.config.radix and request.key and request.source is not None and finish.type != "abort":
            own = request.sequence_tokens - 1 - request.node_tokens
            self.pool.share(request, request.cache_key()[:-TOKEN_BYTES], own)
        self._leave(request)
        request.finish = finish


def _advance(request: Request) -> Finish | None:
    """The next token of a source; the length comes before whatever else could end it."""
    assert request.source is not None
    finish = request.source.advance()
    if request.output_tokens >= request.max_new_tokens:
        return Finish("length", length=request.max_new_tokens)
    return finish
