"""Capacity and timing of the simulated engine."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the server's flags and its GPUs decide; times in seconds."""

    kv_tokens: int
    context_tokens: int = 262_144
    max_running: int = 2048
    max_queued: int | None = None
    chunk_tokens: int = 8192
    max_prefill_tokens: int = 16_384
    conservativeness: float = 1.0
    radix: bool = True
    step_s: float = 0.030
    per_running_s: float = 0.00045
    per_kv_token_s: float = 0.06e-6
    prefill_tokens_per_s: float = 5000.0
    per_chunk_s: float = 0.050

    @property
    def max_request_tokens(self) -> int:
        """Prompt and answer of one request together are shorter than this by one."""
        return min(self.context_tokens, self.kv_tokens) - 1

    @property
    def max_input_tokens(self) -> int:
        """The server's `max_req_input_len`."""
        return self.max_request_tokens - 5


def steps_before(until_s: float, fixed: float, growth: float) -> int:
    """How many steps start before `until_s`, when k steps take fixed·k + growth·k·(k-1)."""
    if math.isinf(until_s):
        return 1 << 60
    slope = fixed - growth
    if growth <= 0:
        return math.ceil(until_s / fixed)
    return math.ceil((math.sqrt(slope * slope + 4 * growth * max(0.0, until_s)) - slope) / (2 * growth))
