"""Which prompt goes next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from promptmill.generation.picker import Picker
from promptmill.types import Prompt, PromptRow


def prompt(partition: str, n: int) -> Prompt:
    name = f"{partition}{n}"
    row = PromptRow(n, name, f"f:{n}", [[]], None, [1], [[name]])
    return Prompt(name, partition, [1], 0, 0, 10, row, [])


def prompts(partition: str, total: int) -> list[Prompt]:
    return [prompt(partition, n) for n in range(total)]


def pick_all(picker: Picker, skip: Callable[[Prompt], bool] = lambda p: False) -> list[str]:
    def picked() -> Iterator[str]:
        while one := picker.pick(lambda _: 0, skip):
            yield one.prompt_hash

    return list(picked())


def test_picker_takes_the_partition_that_is_furthest_behind() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 4), 4, "short", None)
    picker.add("b", prompts("b", 2), 2, "short", None)
    order = pick_all(picker)
    assert sorted(order) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert set(order[:3]) == {"a0", "b0", "a1"}, "at half of all, every partition has sent half"


def test_picker_sends_retries_before_anything_fresh() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 2), 2, "short", None)
    picker.add("b", prompts("b", 2), 2, "short", None)
    assert picker.pick(lambda _: 0, lambda p: False) is not None
    picker.put_ahead(prompt("b", 9))
    assert pick_all(picker)[0] == "b9"


def test_picker_keeps_to_the_cap_of_a_class() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 2), 2, "long", 1)
    picker.add("b", prompts("b", 1), 1, "short", None)
    full = {"long": 1, "short": 7}
    assert [p.prompt_hash for p in iter(lambda: picker.pick(full.__getitem__, lambda p: False), None)] == [
        "b0"
    ]
    assert not picker.exhausted("a")


def test_picker_remembers_what_it_skipped() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 3), 3, "short", None)
    assert pick_all(picker, skip=lambda p: p.prompt_hash == "a1") == ["a0", "a2"]
    assert picker.exhausted("a")
    assert picker.skipped("a") == {"a1"}


def test_picker_drops_retries_of_a_partition_that_has_left() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 1), 1, "short", None)
    picker.remove("a")
    picker.put_ahead(prompt("a", 0))
    assert pick_all(picker) == []


def test_picker_keeps_partitions_with_long_answers_slightly_ahead() -> None:
    picker = Picker({"short": 500.0, "long": 5_000.0})
    picker.add("short", prompts("short", 100), 100, "a", None)
    picker.add("long", prompts("long", 100), 100, "a", None)
    first = pick_all(picker)[:100]
    assert sum(name.startswith("long") for name in first) == 55, "1.25 against 1.025"


def test_picker_learns_how_long_answers_are() -> None:
    picker = Picker({"b": 1_000.0})
    for name in ("a", "b"):
        picker.add(name, prompts(name, 1), 1, "short", None)
    assert picker.mean_outputs() == {"a": 2_500.0, "b": 1_000.0}
    for _ in range(8):
        picker.finished("a", 500)
    picker.remove("a")
    picker.add("a", prompts("a", 1), 1, "short", None)
    assert picker.mean_outputs() == {"a": pytest.approx(1_500.0), "b": 1_000.0}


def test_picker_sends_a_partition_of_twice_the_weight_at_twice_the_pace() -> None:
    picker = Picker()
    picker.add("a", prompts("a", 40), 40, "short", None, weight=2.0)
    picker.add("b", prompts("b", 40), 40, "short", None)
    assert sum(name.startswith("a") for name in pick_all(picker)[:30]) == 20


def test_picker_counts_a_retry_once_and_every_turn() -> None:
    for again in (True, False):
        picker = Picker()
        picker.add("a", prompts("a", 2), 4, "short", None)
        picker.add("b", prompts("b", 4), 4, "short", None)
        one = picker.pick(lambda _: 0, lambda p: False)
        assert one is not None
        picker.put_ahead(one, again=again)
        order = pick_all(picker)
        assert order[0] == "a0"
        assert order[1:3] == (["b0", "a1"] if again else ["b0", "b1"])
