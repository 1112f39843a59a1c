"""In which order the prompts of one partition are asked. Pure.

Prompts that begin alike (the same system message and tools) follow each other, so that the server computes
their common start once; everything else is shuffled, as the order of a file often goes with length. A whole
partition does not fit into memory, so this is done block by block.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from promptmill.types import Message, PromptRow

T = TypeVar("T")

BLOCK_ITEMS = 2_000
BLOCK_TOKENS = 4_000_000
"""16 MB where ids are packed, and as much of text."""


def in_families(
    items: Iterable[T],
    family: Callable[[T], Hashable],
    tokens: Callable[[T], int],
    seed: str,
    block_items: int = BLOCK_ITEMS,
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[T]:
    """All `items`, reordered within blocks of so many items or tokens, whichever is reached first.

    Those of a family stay together and in order; None is no family. The same seed gives the same order.
    """
    rng = random.Random(seed)
    block: list[T] = []
    held = 0
    for item in items:
        block.append(item)
        held += tokens(item)
        if len(block) >= block_items or held >= block_tokens:
            yield from _shuffled(block, family, rng)
            block, held = [], 0
    yield from _shuffled(block, family, rng)


def _shuffled(block: list[T], family: Callable[[T], Hashable], rng: random.Random) -> Iterator[T]:
    groups: dict[Hashable, list[T]] = {}
    for place, item in enumerate(block):
        key = family(item)
        groups.setdefault(("alone", place) if key is None else ("family", key), []).append(item)
    units = list(groups.values())
    rng.shuffle(units)
    for unit in units:
        yield from unit


def family_of(row: PromptRow) -> bytes | None:
    """What prompts with the same start have in common: leading system messages and tools; None without."""
    return family_of_start(row.turns[0], row.tools)


def family_of_start(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> bytes | None:
    """The same of a first turn and its tools."""
    leading = []
    for message in messages:
        if message["role"] != "system":
            break
        leading.append(message)
    if not leading and not tools:
        return None
    start = repr([leading, tools]).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(start, digest_size=16).digest()
