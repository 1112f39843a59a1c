"""What a report says of the servers' ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tasks.reporting import deaths


def test_deaths_are_numbered_and_lives_that_went_well_are_left_out() -> None:
    lives = [
        SimpleNamespace(server=f"s{n}", cause_of_death=cause, remedy="relaunched")
        for n, cause in enumerate(["killed", "", "out of memory"])
    ]
    assert deaths(cast(Any, lives)) == "\n1. s0: killed. relaunched.\n2. s2: out of memory. relaunched."
