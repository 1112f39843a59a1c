from __future__ import annotations

import pytest

from promptmill.release.quality import is_repetitive, judge
from promptmill.splitting import Split
from promptmill.types import Completion

GOOD = Split("because", "4", 2, [])
OPEN = Split("because of", "", 5, ["reasoning_never_closed"])


def verdict(
    split: Split = GOOD, reason: str = "stop", ids: list[int] | None = None, cap: int = 5
) -> tuple[str, list[str]]:
    return judge(Completion([1, 2, 3, 4, 5] if ids is None else ids, reason, 3), split, cap)


def test_answer_that_stopped_is_answered() -> None:
    assert verdict() == ("answered", [])
    assert verdict(cap=100) == ("answered", [])


def test_answer_at_the_cap_is_truncated() -> None:
    assert verdict(reason="length") == ("truncated", [])
    assert verdict(OPEN, reason="length") == ("truncated", ["reasoning_never_closed"])


def test_answer_cut_below_the_cap_is_clipped() -> None:
    assert verdict(reason="length", cap=6) == ("truncated", ["clipped"])


def test_answer_without_content_is_empty() -> None:
    assert verdict(Split("", "", 0, []), ids=[2]) == ("empty", [])
    assert verdict(OPEN) == ("empty", ["reasoning_never_closed"])


def test_answer_in_a_loop_is_flagged() -> None:
    loop = [9, *[1, 2, 3] * 8, 0]  # the stop token ends it
    assert verdict(ids=loop, cap=100) == ("flagged", ["repetition"])
    assert verdict(ids=loop[:-1], reason="length", cap=25) == ("truncated", ["repetition"])


def test_answer_whose_split_found_something_is_flagged() -> None:
    assert verdict(Split("", "half \ufffd", 0, ["cut_character"])) == ("flagged", ["cut_character"])
    cut = Split("", "half \ufffd", 0, ["cut_character"])
    assert verdict(cut, reason="length") == ("truncated", ["cut_character"])


def test_reasoning_left_for_a_call_is_nothing_wrong() -> None:
    assert verdict(Split("because", "call", 2, ["left_for_tool_call"])) == (
        "answered",
        ["left_for_tool_call"],
    )
    flags = ["left_for_tool_call", "control_tokens"]
    assert verdict(Split("because", "call", 2, flags)) == ("flagged", flags)


@pytest.mark.parametrize("period", [1, 3, 8, 24])
def test_repetition_is_found_for_every_period(period: int) -> None:
    unit = list(range(100, 100 + period))
    times = max(4, -(-24 // period))
    assert is_repetitive([7, 8, *unit * times])
    assert is_repetitive((unit * (times + 1))[period // 2 :])  # cut inside the loop's first round


@pytest.mark.parametrize(
    "ids",
    [
        [],
        [5] * 23,
        [*[1, 2, 3] * 8, 4],
        list(range(24)) * 3,
        list(range(25)) * 4,
        [1, 2, 1, 3] * 2 + [1, 2, 1, 4] * 10 + [9],
    ],
)
def test_repetition_asks_for_a_whole_loop_at_the_end(ids: list[int]) -> None:
    assert not is_repetitive(ids)
