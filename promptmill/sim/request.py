"""What the engine works on: a request, how it ended, and what one step did."""

from __future__ import annotations

import itertools
import zlib
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from promptmill.sim.radix import Node, token_key

if TYPE_CHECKING:
    from promptmill.sim.scheduler import Engine

_unique = itertools.count(1)


class Source(Protocol):
    """Where a request's tokens come from."""

    output_ids: list[int]

    def advance(self) -> Finish | None:
        """Append one id to `output_ids`; returns how the request ends, or None while it goes on."""


@dataclass(frozen=True, slots=True)
class Finish:
    """A finish reason: `stop` (matched), `length` (length) or `abort` (message, status_code)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As in `meta_info.finish_reason`."""
        if self.type == "stop":
            return {"type": "stop", "matched": self.matched}
        if self.type == "length":
            return {"type": "length", "length": self.length}
        keys = ("type", "message", "status_code", "err_type")
        return {key: getattr(self, key) for key in keys}


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. Build it with `from_ids` or, where only counts matter, with `counted`."""

    rid: str
    prompt_tokens: int
    max_new_tokens: int
    key: bytes = b""
    """The prompt as the prefix cache compares it."""
    source: Source | None = None
    end_tokens: int | None = None
    """Without a source: it stops after this many tokens."""
    finish: Finish | None = None
    """Set by the engine when it is over."""
    retractions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    # The engine's own:
    engine: Engine | None = None
    base_tokens: int = 0
    joined_at: int = 0
    node: Node | None = None
    node_tokens: int = 0
    prefilled_tokens: int = 0
    to_prefill_tokens: int = 0

    @classmethod
    def from_ids(cls, rid: str, ids: list[int], max_new_tokens: int, source: Source) -> Request:
        """A request with real tokens on both sides."""
        return cls(rid, len(ids), max_new_tokens, token_key(ids), source)

    @classmethod
    def counted(
        cls, rid: str, prompt_tokens: int, output_tokens: int, max_new_tokens: int,
        family: str = "", shared_tokens: int = 0,
    ) -> Request:  # fmt: skip
        """A request of so many tokens; those of one `family` share their first `shared_tokens`."""
        shared = min(shared_tokens, prompt_tokens) if family else 0
        key = b""
        if shared:
            key = _family_key(family, shared)
        if own := prompt_tokens - shared:
            key += token_key([next(_unique)]) + bytes(4 * (own - 1))
        return cls(rid, prompt_tokens, max_new_tokens, key, None, output_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens produced so far, at any moment."""
        if self.engine is None:
            return self.base_tokens
        return self.base_tokens + self.engine.decode_steps - self.joined_at

    @property
    def remaining_tokens(self) -> int:
        return self.max_new_tokens - self.output_tokens

    @property
    def sequence_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens

    def cache_key(self) -> bytes:
        """Prompt and, where its ids are known, output."""
        if self.source is None or not self.source.output_ids:
            return self.key
        return self.key + token_key(self.source.output_ids)

    def counted_end(self) -> int:
        """Tokens after which a request without a source is over."""
        return min(self.max_new_tokens, self.end_tokens or self.max_new_tokens)

    def counted_finish(self) -> Finish | None:
        if self.source is not None or self.output_tokens < self.counted_end():
            return None
        if self.output_tokens >= self.max_new_tokens:
            return Finish("length", length=self.max_new_tokens)
        return Finish("stop")


@lru_cache(maxsize=256)
def _family_key(family: str, tokens: int) -> bytes:
    start = (zlib.crc32(family.encode()) & 0x3FFFFFFF) - (1 << 30)
    return array("i", range(start, start + tokens)).tobytes()


@dataclass(slots=True)
class Step:
    """What one call of `Engine.step` did."""

    kind: str = "idle"
    """`prefill`, `decode` or `idle`."""
    duration_s: float = 0.0
    steps: int = 0
    """Decode steps made; each running request got one token in each."""
    tokens: int = 0
    """Tokens produced by all requests together."""
    running: int = 0
    """Requests that ran while it was made, those that are being prefilled not among them."""
    used_tokens: int = 0
    """KV tokens in use after it."""
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    """Requests prefilled and how many of their tokens."""
    prefill_tokens: int = 0
    cached_tokens: int = 0
    new_seqs: int = 0
    started: list[Request] = field(default_factory=list)
    """Their prefill is over: they got a token (the first, unless they were retracted before)."""
    finished: list[Request] = field(default_factory=list)
    retracted: list[Request] = field(default_factory=list)
    gained_tokens: int = 0
    """Set free by a retraction; prompts that stay in the prefix cache do not count."""
    ratio_before: float = 0.0
    ratio_after: float = 0.0
