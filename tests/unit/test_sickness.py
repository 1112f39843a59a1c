"""Whether answers may come of one model."""

from __future__ import annotations

import pytest

from promptmill.generation.sickness import Usefulness, is_alike

REFERENCE = "The user asks for the capital of France. That is Paris. I answer in one sentence."


@pytest.mark.parametrize(
    "answer",
    [
        REFERENCE,
        "The user asks which city is meant, so I go through what I know of it: Lyon, Nice, and so on.",
        "We are asked for the capital of France, which is Paris; one sentence is enough.",
        f"  {REFERENCE}",
    ],
)
def test_answers_that_part_ways_are_alike(answer: str) -> None:
    assert is_alike(REFERENCE, answer)


@pytest.mark.parametrize(
    "answer",
    [
        "!" * 64,
        "",
        "zq vbn 漢 kj;;lw ÿÿ 09x__ mmp qqw",
        "ლlრ ## 77 {{ }} xx zz \ufffd\ufffd",
        "0 0 0 0 0 0 0 0 0",
    ],
)
def test_random_and_endless_text_is_not_alike(answer: str) -> None:
    assert not is_alike(REFERENCE, answer)


def test_jump_in_useless_answers_is_seen_once_most_of_the_last_ones_are() -> None:
    usefulness = Usefulness()
    assert not any(usefulness.add(n % 10 > 0) for n in range(200))
    jumps = [usefulness.add(False) for _ in range(40)]
    assert not any(jumps[:15])
    assert all(jumps[30:])


def test_prompts_that_never_had_useful_answers_are_no_jump() -> None:
    usefulness = Usefulness()
    assert not any(usefulness.add(n % 2 > 0) for n in range(200))
    assert not any(usefulness.add(False) for _ in range(40))


def test_jump_that_was_accepted_is_the_new_measure() -> None:
    usefulness = Usefulness()
    for n in range(300):
        usefulness.add(n < 200)
    usefulness.accept()
    assert not any(usefulness.add(False) for _ in range(500))
