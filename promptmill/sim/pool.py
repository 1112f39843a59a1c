"""The KV tokens of one engine: those of the prefix cache, and those of one request alone."""

from __future__ import annotations

from promptmill.sim.radix import TOKEN_BYTES, RadixCache
from promptmill.sim.request import Request


class KvPool:
    """Counts; nothing is stored."""

    def __init__(self, kv_tokens: int) -> None:
        self.kv_tokens = kv_tokens
        self.cache = RadixCache()
        self.private_tokens = 0
        """Outside the prefix cache: answers, and prompts in prefill."""

    @property
    def free_tokens(self) -> int:
        return self.kv_tokens - self.cache.total_tokens - self.private_tokens

    @property
    def available_tokens(self) -> int:
        """Free, or held by the prefix cache for nobody."""
        return self.free_tokens + self.cache.evictable_tokens

    @property
    def used_tokens(self) -> int:
        return self.kv_tokens - self.available_tokens

    def take(self, tokens: int) -> None:
        """Give tokens to requests, out of the prefix cache if need be."""
        self.private_tokens += tokens
        if (free := self.free_tokens) < 0:
            self.cache.evict(-free)

    def release(self, request: Request, private_tokens: int) -> None:
        """A request lets go of its own tokens and of its prefix, which stays in the cache."""
        self.private_tokens -= private_tokens
        self.cache.unlock(request.node or self.cache.root)
        request.node, request.node_tokens = None, 0

    def share(self, request: Request, key: bytes, own_tokens: int) -> None:
        """Put `key` into the prefix cache and hold it there for the request.

        `own_tokens` of it were the request's own; twins of what is cached already are freed.
        """
        node, _ = self.cache.insert(key)
        self.cache.lock(node)
        self.cache.unlock(request.node or self.cache.root)
        self.private_tokens -= own_tokens
        request.node, request.node_tokens = node, len(key) // TOKEN_BYTES
