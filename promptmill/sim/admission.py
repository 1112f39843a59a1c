"""Which requests are prefilled next: SGLang's PrefillAdder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptmill.sim.radix import TOKEN_BYTES
from promptmill.sim.request import Step

if TYPE_CHECKING:
    from promptmill.sim.scheduler import Engine

CLIP_NEW_TOKENS = 4096
"""Of what a request may still produce, no more than this is reserved."""


def build_prefill(engine: Engine, step: Step) -> bool:
    """Choose what is prefilled now; its prefix is locked and its batch is in `step.prefills`."""
    if not engine.chunked and (engine.full or not engine.waiting):
        return False
    room = engine.pool.available_tokens - _may_produce(engine) * engine.ratio
    chunk, budget = engine.config.chunk_tokens, engine.config.max_prefill_tokens
    if engine.config.chunk_tokens <= 0:
        chunk = engine.config.kv_tokens
    if engine.chunked:
        request = engine.chunked
        take = min(chunk, request.to_prefill_tokens, engine.pool.available_tokens)
        if take <= 0:
            return False
        step.prefills.append((request, take))
        done = take == request.to_prefill_tokens
        engine.chunked = None if done else request
        room -= take + (min(request.remaining_tokens, CLIP_NEW_TOKENS) if done else 0)
        chunk, budget = chunk - take, budget - take
    while engine.waiting and not engine.chunked and chunk > 0 and budget > 0:
        if len(engine.running) + len(step.prefills) >= engine.config.max_running:
            engine.full = True
            break
        taken = _admit(engine, step, room, chunk, budget)
        if taken is None:
            break
        room -= taken[0]
        chunk, budget = chunk - taken[1], budget - taken[1]
    return bool(step.prefills)


def _may_produce(engine: Engine) -> int:
    """Tokens that the running requests may still produce, as far as they are reserved."""
    # `remaining_tokens` spelled out: its two calls a request were a third of a run in virtual time.
    made = engine.decode_steps
    return sum(
        min(r.max_new_tokens - r.base_tokens - made + r.joined_at, CLIP_NEW_TOKENS)
        for r in engine.running.values()
    )


def _admit(engine: Engine, step: Step, room: float, chunk: int, budget: int) -> tuple[int, int] | None:
    """Take the head of the queue if it fits: what it costs of the room, and its tokens in this batch."""
    request = engine.waiting[0]
    before = engine.pool.cache.evictable_tokens
    node, cached = engine.pool.cache.root, 0
    if engine.config.radix and request.key:
        node, cached = engine.pool.cache.match(request.cache_key()[:-TOKEN_BYTES])
    extend = request.sequence_tokens - cached
    wanted = extend + min(request.remaining_tokens, CLIP_NEW_TOKENS)
    if wanted >= room:
        engine.full = True
        return None
    if step.prefills and extend >= budget:
        return None
    engine.pool.cache.lock(node)
    locked = before - engine.pool.cache.evictable_tokens
    if wanted >= room - locked:
        engine.pool.cache.unlock(node)
        engine.full = True
        return None
    engine.waiting.popleft()
    request.node, request.node_tokens = node, cached
    request.cached_tokens = cached if not request.retractions else request.cached_tokens
    request.prefilled_tokens, request.to_prefill_tokens = 0, extend
    step.new_seqs += 1
    step.cached_tokens += cached
    take = min(extend, chunk)
    step.prefills.append((request, take))
    if take < extend:
        engine.chunked = request
        return locked + take, take
    return locked + wanted, take
