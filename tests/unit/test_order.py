"""The order of the prompts of one partition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from promptmill.generation.order import family_of, in_families
from promptmill.types import Message, PromptRow

ITEMS = [("s" if n % 3 else "t" if n % 2 else None, n) for n in range(60)]


def ordered(seed: str = "A", **bounds: int) -> list[tuple[str | None, int]]:
    return list(in_families(ITEMS, lambda item: item[0], lambda item: 10, seed, **bounds))


def runs_of(family: str, items: list[tuple[str | None, int]]) -> int:
    return sum(key == family for key, _ in groupby(items, key=lambda item: item[0]))


def row(*messages: Message, tools: list[dict[str, object]] | None = None) -> PromptRow:
    return PromptRow(0, "id", "f:1", [list(messages)], tools, [1], [["hash"]])


def test_order_keeps_families_together_and_shuffles_the_rest() -> None:
    items = ordered()
    assert sorted(items, key=lambda item: item[1]) == ITEMS
    assert (runs_of("s", items), runs_of("t", items)) == (1, 1)
    assert [n for key, n in items if key == "s"] == [n for key, n in ITEMS if key == "s"]
    alone = [n for key, n in items if key is None]
    assert alone != sorted(alone)


def test_order_is_the_same_for_the_same_seed() -> None:
    assert ordered() == ordered()
    assert ordered("A") != ordered("B")


def test_order_holds_no_more_than_a_block() -> None:
    for bounds in ({"block_items": 20}, {"block_tokens": 200}, {"block_items": 20, "block_tokens": 200}):
        read = 0

        def items() -> Iterator[tuple[str | None, int]]:
            nonlocal read
            for item in ITEMS:
                read += 1
                yield item

        stream = in_families(items(), lambda item: item[0], lambda item: 10, "A", **bounds)
        first = [next(stream) for _ in range(20)]
        assert read == 20
        assert {n for _, n in first} == set(range(20))
        assert len([*first, *stream]) == 60


def test_order_of_nothing_is_nothing() -> None:
    assert list(in_families([], lambda item: None, lambda item: 1, "A")) == []


def test_family_is_the_leading_system_messages_and_the_tools() -> None:
    system, user = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
    tools: list[dict[str, object]] = [{"name": "f"}]
    assert family_of(row(user)) is None
    assert family_of(row(user, system)) is None
    assert family_of(row(system, user)) == family_of(row(system, {"role": "user", "content": "other"}))
    starts = [row(system), row(system, system), row(system, tools=tools), row(user, tools=tools)]
    assert len({family_of(one) for one in starts}) == 4
    assert family_of(row({"role": "system", "content": "\ud800"}, user)) is not None
