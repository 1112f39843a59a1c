"""Which tokens of a broken stream may be kept."""

from __future__ import annotations

from typing import Any

import pytest

from promptmill.generation.resume import kept_tokens
from promptmill.settings import SamplingSettings

IDS = [5, 6, 7, 8, 9]


def kept(ids: list[int] = IDS, cap: int = 64, end: int = 2, **sampling: Any) -> list[int]:
    return kept_tokens(ids, SamplingSettings(**sampling), cap, {end})


def test_all_of_a_plain_stream_is_kept() -> None:
    assert kept() == IDS
    assert kept(temperature=0.7, top_k=5, seed=3, repetition_penalty=1.0, frequency_penalty=0.0) == IDS
    assert kept([]) == []


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.1},
        {"presence_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"ebnf": "root ::= [a-z]+"},
    ],
)
def test_what_counts_output_only_starts_over(sampling: dict[str, Any]) -> None:
    assert kept(**sampling) == []


def test_nothing_from_an_end_token_on_is_kept() -> None:
    assert kept([5, 6, 2, 8]) == [5, 6]
    assert kept([5, 6, 7, 8], stop_token_ids=[7]) == [5, 6]
    assert kept([2, 5]) == []


def test_one_token_is_always_left_to_ask_for() -> None:
    assert kept(cap=5) == IDS[:4]
    assert kept(cap=3) == IDS[:2]
    assert kept(cap=1) == []


def test_a_stop_text_is_looked_for_across_the_seam() -> None:
    assert kept(stop=["###", "\n"]) == IDS[:2]
    assert kept(stop=["é"]) == IDS[:3]
    assert kept(stop=["longer than that"]) == []
