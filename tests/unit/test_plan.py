"""`promptmill plan`: what the prompts are, what would be asked again, and how long it would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import make_answer, user, write_lines

from benchmarks.admission import read_workload
from promptmill.cli import main
from promptmill.planning.estimate import Servers, answer_lengths, estimate
from promptmill.planning.simulation import Simulation, Work
from promptmill.planning.survey import Survey
from promptmill.profile import load_profile
from promptmill.prompts.manifest import load_current, read_keys
from promptmill.store.store import Store
from promptmill.types import Manifest

SYSTEM = {"role": "system", "content": "Answer as a farmer would, in one short sentence. " * 4}
ROWS: list[Any] = [
    *({"messages": [SYSTEM, user(f"What is {n} + {n}?")]} for n in range(20)),
    *({"messages": [user(f"Say {n}.")]} for n in range(10)),
    {"messages": [user("Say 3.")], "id": "again"},
    {"messages": [{"role": "pirate", "content": "arr"}]},
    "{not json",
]
PROFILE = """
model = "embedded:smollm2"
[server]
engine = "sglang"
version = "0.5.9"
command = ["true"]
[server.flags]
context-length = 8192
[classes.short]
max_new_tokens = 1000
[store]
url = "{folder}/store"
[release]
url = "{folder}/release"
[[partitions]]
name = "A"
source = "{folder}/a.jsonl"
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    write_lines(tmp_path / "a.jsonl", ROWS)
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE.format(folder=tmp_path), encoding="utf-8")
    return path


def planned(capsys: pytest.CaptureFixture[str], profile: Path, *arguments: str) -> str:
    assert main(["plan", str(profile), *arguments]) == 0
    return capsys.readouterr().out


def test_plan_counts_families_repetitions_and_rejects_and_names_the_chosen_format(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    out = planned(capsys, profile)
    assert "A: 33 rows (messages in messages, chosen by auto), 31 prompts" in out
    assert "1 rejected: unknown_role" in out
    assert "a.jsonl:32: unknown_role" in out
    assert "1 families that begin alike" in out
    assert "1 duplicate_joined: " in out
    assert "tokens: ≤128 100 %" in out
    assert "30 requests, answers of 1,000 tokens on average, assumed" in out
    assert "159,000 KV tokens" in out
    assert "376,000 KV tokens" in out


def test_plan_as_json_holds_everything(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    arguments = ("--kv-tokens", "9000", "--kv-tokens", "900", "--mean-output", "200")
    plan = json.loads(planned(capsys, profile, "--json", *arguments))
    part = plan["partitions"]["A"]
    assert (part["rows"], part["prompts"], part["requests_left"], part["repeats"]) == (33, 31, 30, 1)
    assert part["rejected"] == 2
    assert part["rejected_by_reason"] == {"unknown_role": 1, "bad_json": 1}
    assert part["families"] == 1
    assert sum(part["tokens"]["histogram"]["prompts"]) == 31
    assert 19 * 45 < part["reusable_tokens"] < part["prompt_tokens"]
    assert part["mean_output"] == 200
    fits, too_small = plan["estimates"]
    assert (fits["requests"], fits["sampled"], fits["nights"]) == (30, 30, 1)
    assert fits["output_tokens"] == pytest.approx(30 * 200, rel=0.02)
    assert too_small == {"kv_tokens": 900, "fits": False}


def test_plan_says_which_answered_rows_would_be_asked_again_and_leaves_the_old_manifest(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    planned(capsys, profile)
    store = Store(load_profile(str(profile)))
    before = load_current(store.manifests, "A")
    assert before is not None
    store.open("test")
    for hashes in read_keys(before):
        store.put(make_answer(hashes[0][0])).result(10)
    store.remember("mean_outputs", {"A": 321.0})
    store.close()
    assert "nothing is left to ask" in planned(capsys, profile)
    out = planned(capsys, profile, "--set", "sampling.temperature=0.5")
    assert "WARNING: 31 of 31 answered rows would be asked again, because of: sampling.temperature" in out
    assert "--accept-redo" in out
    assert "answers of 321 tokens on average, as measured" in out
    assert load_current(store.manifests, "A") == before


def test_plan_of_another_engine_estimates_nothing_unless_told_the_kv_tokens(
    capsys: pytest.CaptureFixture[str], profile: Path
) -> None:
    engine = ("--set", "server.engine=llama_cpp", "--set", "server.flags.ctx-size=9000")
    assert "no estimate of hours" in planned(capsys, profile, *engine, "--set", "server.flags.parallel=1")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-tokens", "0"), "--kv-tokens 0"),
        (("--mean-output", "0"), "--mean-output 0"),
        (("--mean-output", "nan"), "--mean-output nan"),
        (("--limit", str(10**20)), "--limit 1000"),
        (
            ("--kv-tokens", "9000", "--set", "server.flags.schedule-conservativeness=low"),
            "schedule-conservativeness: a number is wanted",
        ),
        (("--set", "store.url=/dev/null"), "/dev/null is a file, and no directory"),
        (("--plot", "plan.pdf"), ".png"),
        (("--plot", "no/such/folder/plan.png"), "no folder"),
    ],
)
def test_plan_refuses_what_cannot_be(
    capsys: pytest.CaptureFixture[str], profile: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert main(["plan", str(profile), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "show", "stop", "reflag", "plan"])
@pytest.mark.parametrize("url", ["/dev/null", "/dev/null/store"])
def test_store_that_is_a_file_is_told_by_every_command(
    capsys: pytest.CaptureFixture[str], profile: Path, command: str, url: str
) -> None:
    assert main([command, str(profile), "--set", f"store.url={url}"]) == 2
    assert f"{url}: /dev/null is a file, and no directory" in capsys.readouterr().err


def test_plan_is_drawn(capsys: pytest.CaptureFixture[str], profile: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    planned(capsys, profile, "--plot", str(tmp_path / "plan.png"), "--kv-tokens", "9000")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_told_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], profile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["plan", str(profile), "--plot", str(tmp_path / "plan.png")]) == 2
    assert ".[plot]" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def surveyed(works: list[Work]) -> list[Survey]:
    surveys = []
    for name in dict.fromkeys(work.partition for work in works):
        mine = [work for work in works if work.partition == name]
        starts = {work.family: work.shared_tokens for work in mine if work.family}
        numbers = {family: number for number, family in enumerate(starts)}
        n, tokens = len(mine), np.array([work.prompt_tokens for work in mine])
        cap = mine[0].max_new_tokens
        manifest = Manifest(
            partition=name,
            key="",
            path="",
            rejects_path="",
            format="text",
            column="",
            rows=n,
            prompts=n,
            rejected={},
            examples=[],
            notes={},
            prompt_tokens=0,
            longest_prompt=int(tokens.max()),
            longest_request=0,
            digest="",
            max_new_tokens=cap,
            identity={},
        )
        families = np.array([numbers[work.family] if work.family else -1 for work in mine])
        shared, ones = np.array([*starts.values()], np.int64), np.ones(n, np.int64)
        surveys.append(Survey(manifest, tokens, families, shared, ones, ones, ones < 1))
    return surveys


def test_estimate_from_a_sample_is_near_the_whole_run_in_virtual_time() -> None:
    works = read_workload(4_400)
    means = {
        name: float(np.mean([work.output_tokens for work in works if work.partition == name]))
        for name in {work.partition for work in works}
    }
    found = estimate(surveyed(works), means, Servers(159_000, 1, 0.3))
    whole = Simulation(works, [159_000]).run()
    assert found is not None
    assert found.sampled < 2_200
    assert found.hours * 3600 == pytest.approx(whole.makespan_s, rel=0.08)
    assert found.output_tokens == pytest.approx(whole.answered_tokens, rel=0.02)


@pytest.mark.parametrize("mean", [1.0, 50.0, 700.0, 999.0, 1000.0, 3000.0])
def test_assumed_lengths_have_the_mean_and_end_at_the_cap(mean: float) -> None:
    lengths = answer_lengths(4_000, mean, 1_000)
    assert min(lengths) >= 1
    assert max(lengths) <= 1_000
    assert np.mean(lengths) == pytest.approx(min(mean, 1_000), rel=0.02, abs=0.6)
