"""The simulated model: what comes next depends on the sequence alone."""

from __future__ import annotations

from typing import Any

import pytest

from promptmill.sim.model import Sampling, Stream, Vocabulary, start

_VOCABULARY = Vocabulary(1000, range(10, 900), eos=(2,), think_open=(4, 5, 6), think_close=(7, 5, 6))


def _stream(prompt: list[int], mean_output: float = 60.0, **sampling: Any) -> Stream:
    given = Sampling(**{"temperature": 0.0, "max_new_tokens": 500, **sampling})
    return start(_VOCABULARY, prompt, given, lambda ids: " ".join(map(str, ids)), mean_output, 40.0)


def _answer(stream: Stream, limit: int = 500) -> list[int]:
    while len(stream.output_ids) < limit and stream.advance() is None:
        pass
    return stream.output_ids


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(seed: int) -> None:
    prompt = [seed + 20, 30, 4, 5, 6]
    whole = _answer(_stream(prompt))
    assert whole[-1] == 2
    for cut in range(len(whole)):
        assert whole[:cut] + _answer(_stream(prompt + whole[:cut])) == whole


def test_reasoning_is_closed_before_the_answer_ends() -> None:
    whole = _answer(_stream([11, 4, 5, 6]))
    closed = next(i for i in range(len(whole)) if whole[i : i + 3] == [7, 5, 6])
    assert 2 not in whole[:closed]
    assert whole.count(2) == 1


def test_a_temperature_mixes_the_seed_in() -> None:
    answers = {tuple(_answer(_stream([11], temperature=1.0, seed=seed))) for seed in range(5)}
    assert len(answers) == 5


def test_min_new_tokens_and_ignore_eos_put_the_end_off() -> None:
    assert len(_answer(_stream([11], mean_output=3.0, min_new_tokens=100))) > 100
    endless = _answer(_stream([11], mean_output=3.0, ignore_eos=True))
    assert len(endless) == 500
    assert 2 in endless


def test_stop_ids_and_stop_strings_end_an_answer_after_the_token_that_completes_them() -> None:
    whole = _answer(_stream([11]))
    stream = _stream([11], stop_token_ids=frozenset({whole[5]}))
    assert _answer(stream) == whole[: whole.index(whole[5]) + 1]
    stream = _stream([11], stop=(f" {whole[7]}",))
    assert _answer(stream) == whole[:8]


def test_mean_lengths_are_met() -> None:
    lengths = [len(_answer(_stream([11, seed], mean_output=50.0))) for seed in range(400)]
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.2)
