"""A broken stream costs the tokens of one stream interval, and changes none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.play import Row, Story, hurried, play
from tests.contract.sglang_place import REAL, sim_model

pytestmark = [
    pytest.mark.skipif(REAL, reason="tests/contract/test_sglang.py does this with the real SGLang"),
    pytest.mark.timeout(900),
]
PROMPTS = 24
STREAM_INTERVAL = 8
SETTINGS = [
    "sampling.temperature=0",
    f"server.stream_interval={STREAM_INTERVAL}",
    "server.inactivity_timeout_s=120",  # a machine that stands still for a while makes no death
    "server.startup_silence_timeout_s=120",
    "server.startup_timeout_s=120",
]
SLOW = {"sim-speed": 20, "sim-mean-output": 200}


@pytest.fixture(scope="module", autouse=True)
def _hurry() -> Iterator[None]:
    with hurried():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    return play(tmp_path_factory.mktemp("undisturbed"), model, PROMPTS, settings=SETTINGS, **SLOW)


def test_prompt_whose_kept_tokens_kill_the_server_is_asked_without_them(model: Path, tmp_path: Path) -> None:
    """It had shown tokens once, so it is no poison."""
    folders = [tmp_path / "undisturbed", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    healthy = play(folders[0], model, 8, settings=SETTINGS, **SLOW)
    longest = max(outputs(healthy).values(), key=len)
    token = longest[0]
    assert not any(token in answer.prompt_ids for answer in healthy.answers.values())
    rows = [Row("die@answers=4", "", "", "", "")] + [Row(f"die@token={token}", "", "", "", "")] * 6
    story = play(folders[1], model, 8, rows, SETTINGS, **SLOW)
    assert story.failed == []
    assert len(story.deaths) == 4, "the first one, one with all, two alone"
    assert outputs(story) == outputs(healthy)


def outputs(story: Story) -> dict[str, list[int]]:
    return {prompt_hash: answer.output_ids for prompt_hash, answer in story.answers.items()}


@pytest.mark.parametrize("fault", ["die", "cut"])
def test_answers_are_those_of_a_run_without_deaths(
    fault: str, undisturbed: Story, model: Path, tmp_path: Path
) -> None:
    rows = [Row(f"{fault}@answers={n}", "", "", "", "") for n in (2, 6, 8)]
    story = play(tmp_path, model, PROMPTS, rows, SETTINGS, **SLOW)
    assert len(story.deaths) == (3 if fault == "die" else 0)
    assert outputs(story) == outputs(undisturbed)
    resumed = [answer for answer in story.answers.values() if answer.resumed_tokens]
    assert resumed
    assert all(answer.resumed_tokens < len(answer.output_ids) for answer in resumed)
    assert story.figures is not None
    assert story.figures.resumed_tokens >= sum(answer.resumed_tokens for answer in resumed)
    assert story.figures.refilled_tokens > story.figures.resumed_tokens
