"""Faults at random over small runs: every prompt exactly once, nothing that was durable asked again.

A selection by default. `CHAOS_FAULTS=200 python -m pytest tests/chaos/test_random_faults.py` plays so many
rounds; `CHAOS_SEED=1 CHAOS_ROUND=7` plays one again. The faults and their moments are those of the numbers;
what happens between two of them is up to the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.rogue import Burst, Plan
from tests.chaos.rounds import Release, Script, draw, play
from tests.contract.sglang_place import sim_model

SEED = int(os.environ.get("CHAOS_SEED") or 1)
SELECTION = [4, 9, 12, 13, 17, 25, 36]
"""Every kind of `rounds.KINDS` is among them, each at its own moment or together with others."""
if one := os.environ.get("CHAOS_ROUND"):
    ROUNDS = [int(one)]
elif many := os.environ.get("CHAOS_FAULTS"):
    ROUNDS = list(range(1, int(many) + 1))
else:
    ROUNDS = SELECTION

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("undisturbed")
    play(folder, model, Script())
    release = Release(folder / "release")
    assert any("#turn2" in row for _, row in release.turns), "no conversation goes on to its end"
    return release


@pytest.mark.parametrize("number", ROUNDS)
def test_round_of_faults_leaves_the_release_of_an_undisturbed_run(
    number: int, undisturbed: Release, model: Path, tmp_path: Path
) -> None:
    script = draw(SEED, number)
    try:
        play(tmp_path, model, script)
        release = Release(tmp_path / "release")
        assert release.manifest["accounting"] == undisturbed.manifest["accounting"]
        assert release.turns == undisturbed.turns
    except Exception as error:
        again = f"CHAOS_SEED={SEED} CHAOS_ROUND={number} python -m pytest tests/chaos/{Path(__file__).name}"
        raise AssertionError(f"{again}\n{script}\n{error}") from error


def test_burst_of_errors_costs_no_prompt(undisturbed: Release, model: Path, tmp_path: Path) -> None:
    play(tmp_path, model, Script(Plan(bursts=[Burst(12, 1.0, "500")])))
    assert Release(tmp_path / "release").turns == undisturbed.turns
