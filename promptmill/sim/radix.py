"""The prefix cache: a radix tree over token ids, evicted least recently used first."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4


def token_key(ids: Iterable[int]) -> bytes:
    """Token ids as the cache compares them: `TOKEN_BYTES` a token."""
    return array("i", ids).tobytes()


class Node:
    """One edge of the tree: tokens that follow its parent's."""

    __slots__ = ("children", "key", "locks", "parent", "used_at")

    def __init__(self, key: bytes, parent: Node | None, used_at: int) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        """Running requests whose tokens go through here; only 0 may be evicted."""
        self.used_at = used_at

    @property
    def tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES


class RadixCache:
    """Counts tokens only: what they hold is the business of whoever runs the model."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything; nothing may be locked."""
        self.root = Node(b"", None, 0)
        self.total_tokens = 0
        self.evictable_tokens = 0
        self._now = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._pushed = 0

    def match(self, key: bytes) -> tuple[Node, int]:
        """The node where the longest known prefix of `key` ends, and its length in tokens."""
        self._now += 1
        node, start = self.root, 0
        while start < len(key):
            child = node.children.get(key[start : start + TOKEN_BYTES])
            if child is None:
                break
            child.used_at = self._now
            common = _common_bytes(child.key, key[start:])
            if common < len(child.key):
                child = self._split(child, common)
            node, start = child, start + common
            if common < len(child.key):
                break
        return node, start // TOKEN_BYTES

    def insert(self, key: bytes) -> tuple[Node, int]:
        """Make `key` known, unlocked. Returns the node where it ends and how many tokens are new."""
        node, known = self.match(key)
        rest = key[known * TOKEN_BYTES :]
        if not rest:
            return node, 0
        leaf = Node(rest, node, self._now)
        node.children[rest[:TOKEN_BYTES]] = leaf
        self.total_tokens += leaf.tokens
        self.evictable_tokens += leaf.tokens
        self._push(leaf)
        return leaf, leaf.tokens

    def lock(self, node: Node) -> None:
        """Keep everything from the root to `node`."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if not at.locks:
                self.evictable_tokens -= at.tokens
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Take one `lock` back."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.locks -= 1
            if not at.locks:
                self.evictable_tokens += at.tokens
                if not at.children:
                    self._push(at)
            at = at.parent

    def evict(self, tokens: int) -> int:
        """Drop unlocked leaves until `tokens` are gone or nothing is left to drop; returns how many went."""
        gone = 0
        while gone < tokens and self._leaves:
            used_at, _, node = heapq.heappop(self._leaves)
            parent = node.parent
            if parent is None or node.children or node.locks:
                continue
            if node.used_at != used_at:  # touched since it was pushed
                self._push(node)
                continue
            del parent.children[node.key[:TOKEN_BYTES]]
            node.parent = None
            gone += node.tokens
            self.total_tokens -= node.tokens
            self.evictable_tokens -= node.tokens
            if parent.parent is not None and not parent.children and not parent.locks:
                self._push(parent)
        return gone

    def _split(self, node: Node, common: int) -> Node:
        """Cut an edge after `common` bytes; returns the new node that ends there."""
        assert node.parent is not None
        upper = Node(node.key[:common], node.parent, node.used_at)
        upper.locks = node.locks
        upper.children[node.key[common : common + TOKEN_BYTES]] = node
        node.parent.children[node.key[:TOKEN_BYTES]] = upper
        node.parent, node.key = upper, node.key[common:]
        return upper

    def _push(self, leaf: Node) -> None:
        self._pushed += 1
        heapq.heappush(self._leaves, (leaf.used_at, self._pushed, leaf))


def _common_bytes(left: bytes, right: bytes) -> int:
    """Length of the common prefix in bytes, cut to whole tokens; bisection, as comparing slices is memcmp."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size - size % TOKEN_BYTES
    low, high = 0, size // TOKEN_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        if left[low * TOKEN_BYTES : middle * TOKEN_BYTES] == right[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low * TOKEN_BYTES
