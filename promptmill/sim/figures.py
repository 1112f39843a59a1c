"""What a scheduler logs about its steps, and its load as others see it."""

from __future__ import annotations

import time
from typing import Any

from promptmill.sim.logs import Log
from promptmill.sim.request import Step
from promptmill.sim.scheduler import Engine


class Figures:
    """Counts what steps did; times are in simulated seconds."""

    def __init__(self, engine: Engine, log: Log, decode_log_interval: int, graphs: bool) -> None:
        self._engine, self._log, self._interval, self._graphs = engine, log, decode_log_interval, graphs
        self._decodes, self._logged_tokens, self._logged_at, self._prefilled_at = 0, 0, 0.0, 0.0
        self.gen_throughput = 0.0
        self._cache_hit_rate = 0.0
        self._uncached_tokens = self._busy_us = self._retracted = 0

    def note(self, step: Step, now_s: float) -> None:
        """Log lines and figures of one step."""
        engine, kv_tokens = self._engine, self._engine.config.kv_tokens
        if step.kind == "prefill":
            rate = step.prefill_tokens / max(now_s - self._prefilled_at, 1e-3)
            self._prefilled_at = now_s
            total = step.prefill_tokens + step.cached_tokens
            self._cache_hit_rate = step.cached_tokens / total if total else 0.0
            self._uncached_tokens += step.prefill_tokens
            self._busy_us += int(step.duration_s * 1e6)
            pending = sum(request.sequence_tokens for request in engine.waiting)
            pending += engine.chunked.to_prefill_tokens if engine.chunked else 0
            self._log.prefill(step, kv_tokens, step.running, len(engine.waiting), pending, rate)
        if step.retracted:
            self._retracted += len(step.retracted)
            self._log.retraction(step)
        self._logged_tokens += step.tokens
        if step.kind == "decode":
            self._decodes += 1
            if self._decodes % self._interval == 0:
                rate = self._logged_tokens / max(now_s - self._logged_at, 1e-3)
                self._logged_tokens, self._logged_at, self.gen_throughput = 0, now_s, round(rate, 2)
                queued = len(engine.waiting)
                self._log.decode(step.running, step.used_tokens, kv_tokens, rate, queued, self._graphs)

    def snapshot(self) -> dict[str, Any]:
        """The load, exact at this moment."""
        engine = self._engine
        return {
            "timestamp": time.time(),
            "running": len(engine.running) + (engine.chunked is not None),
            "waiting": len(engine.waiting),
            "used": engine.pool.used_tokens,
            "evictable": engine.pool.cache.evictable_tokens,
            "pending": sum(request.sequence_tokens for request in engine.waiting),
            "ratio": engine.ratio,
            "gen_throughput": self.gen_throughput,
            "cache_hit_rate": self._cache_hit_rate,
            "uncached": self._uncached_tokens,
            "busy_us": self._busy_us,
            "retracted": self._retracted,
        }
