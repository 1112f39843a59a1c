"""Which streams broke together."""

from __future__ import annotations

from promptmill.generation.breaks import Breaks


def test_most_of_what_is_in_flight_breaks_together() -> None:
    breaks = Breaks()
    for n in range(6):
        breaks.broke(10.0 + n / 10, in_flight=8)
    assert breaks.together(10.0)
    assert breaks.together(10.5)


def test_a_few_among_many_break_by_themselves() -> None:
    breaks = Breaks()
    for n in range(6):
        breaks.broke(10.0 + n / 10, in_flight=150)
    assert not breaks.together(10.3)


def test_three_are_too_few_to_tell() -> None:
    breaks = Breaks()
    for n in range(3):
        breaks.broke(10.0 + n / 10, in_flight=3)
    assert not breaks.together(10.0)


def test_what_breaks_one_after_another_does_not_break_together() -> None:
    breaks = Breaks()
    for n in range(10):
        breaks.broke(10.0 + 2 * n, in_flight=4)
    assert not any(breaks.together(10.0 + 2 * n) for n in range(10))
