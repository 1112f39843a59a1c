"""Which prompt kills the server."""

from __future__ import annotations

from promptmill.generation.suspects import Suspects
from promptmill.types import Prompt
from tests.unit.helpers import make_row


def prompt(name: str) -> Prompt:
    return Prompt(name, "A", [1], 0, 0, 64, make_row(), [])


def died(suspects: Suspects, *names: str) -> str:
    guilty = suspects.died([prompt(name) for name in names])
    return guilty.prompt_hash if guilty else ""


def tried(suspects: Suspects) -> str:
    found = suspects.next()
    return found.prompt_hash if found else ""


def test_suspects_are_tried_one_at_a_time_in_order() -> None:
    suspects = Suspects()
    assert died(suspects, "a", "b") == ""
    assert (tried(suspects), tried(suspects)) == ("a", "")
    suspects.cleared("a")
    assert tried(suspects) == "b"
    suspects.cleared("b")
    assert not suspects
    assert tried(suspects) == ""


def test_suspect_on_trial_at_two_deaths_is_guilty_and_the_others_stay_suspects() -> None:
    suspects = Suspects()
    died(suspects, "a", "poison", "c")
    tried(suspects)
    suspects.cleared("a")
    assert tried(suspects) == "poison"
    assert died(suspects, "poison") == ""
    assert tried(suspects) == "poison"
    assert died(suspects, "poison") == "poison"
    assert "poison" not in suspects
    assert tried(suspects) == "c"


def test_one_death_alone_is_a_coincidence() -> None:
    suspects = Suspects()
    died(suspects, "innocent", "b")
    tried(suspects)
    died(suspects, "innocent")
    assert tried(suspects) == "innocent"
    suspects.cleared("innocent")
    died(suspects, "innocent", "b")
    tried(suspects)
    assert died(suspects, "innocent") == "", "what it once answered is not forgotten"


def test_death_with_nobody_on_trial_finds_no_guilty() -> None:
    suspects = Suspects()
    died(suspects, "a")
    tried(suspects)
    suspects.cleared("a")
    assert died(suspects) == ""
    assert died(suspects, "b") == ""
    assert "b" in suspects


def test_death_of_another_server_leaves_a_trial_alone() -> None:
    suspects = Suspects()
    died(suspects, "a", "b")
    assert tried(suspects) == "a"
    assert died(suspects, "c") == ""
    suspects.interrupted([prompt("c")])
    assert tried(suspects) == "", "it still runs where it was sent"
    assert died(suspects, "a") == ""
    assert tried(suspects) == "a"
    assert died(suspects, "a") == "a", "alone at two deaths"


def test_suspect_that_was_not_taken_is_tried_again_and_not_guilty() -> None:
    suspects = Suspects()
    died(suspects, "a")
    tried(suspects)
    suspects.postponed("a")
    assert died(suspects) == ""
    assert tried(suspects) == "a"


def test_clearing_another_prompt_ends_no_trial() -> None:
    suspects = Suspects()
    died(suspects, "a", "b")
    assert tried(suspects) == "a"
    suspects.cleared("b")
    assert "b" not in suspects
    assert tried(suspects) == ""
