"""`promptmill show` and `stop`: what they say of what they do not show, or see."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import make_answer, write_lines

from promptmill.cli import main
from promptmill.profile import load_profile
from promptmill.prompts.manifest import load_current, read_keys
from promptmill.store.store import Store

PROFILE = """
model = "embedded:smollm2"
[server]
engine = "llama_cpp"
[classes.short]
max_new_tokens = 64
[store]
url = "{folder}/store"
[[partitions]]
name = "A"
source = "{folder}/a.jsonl"
"""


@pytest.fixture
def profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Twelve rows with answers, one of them flagged; one without; two that are rejected."""
    rows = [*({"id": f"r{n}", "prompt": f"Say {n}."} for n in range(13)), "{no json", {"other": 1}]
    write_lines(tmp_path / "a.jsonl", rows)
    path = tmp_path / "profile.toml"
    path.write_text(PROFILE.format(folder=tmp_path), encoding="utf-8")
    assert main(["plan", str(path)]) == 0
    store = Store(load_profile(str(path)))
    manifest = load_current(store.manifests, "A")
    assert manifest is not None
    store.open("test")
    for n, hashes in enumerate([*read_keys(manifest)][:12]):
        changes = {"status": "flagged", "flags": ["repetition"]} if n == 3 else {}
        store.put(make_answer(hashes[0][0], **changes)).result(10)
    store.close()
    capsys.readouterr()
    return str(path)


def test_show_says_how_many_rows_are_not_shown_and_why(
    capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    assert main(["show", profile]) == 0
    out = capsys.readouterr().out
    assert out.count("answer (") == 10
    assert "10 of 12 rows; name an id" in out
    assert "A: 1 rows are not answered yet." in out
    assert "A: 2 rows are rejected; see --flag rejected." in out


def test_show_of_rejected_rows_gives_place_and_reason(
    capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    assert main(["show", profile, "--flag", "rejected"]) == 0
    out = capsys.readouterr().out
    assert "a.jsonl:14" in out
    assert "bad_json" in out
    assert "a.jsonl:15" in out
    assert "no_prompt" in out


def test_show_of_an_unknown_flag_names_those_that_there_are(
    capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    assert main(["show", profile, "--flag", "repetition"]) == 0
    assert main(["show", profile, "--flag", "truncated"]) == 1
    assert "no answer fits" in capsys.readouterr().err
    assert main(["show", profile, "--flag", "repetitoin"]) == 2
    words = capsys.readouterr().err
    assert "--flag repetitoin" in words
    assert "flags that answers have: repetition" in words


def test_flags_of_sealed_answers_are_known(profile: str) -> None:
    store = Store(load_profile(profile))
    store.open("test")
    assert store.flags() == {"repetition"}
    assert store.seal_all() == 12
    store.close()
    assert store.flags() == {"repetition"}


def test_stop_without_a_run_says_that_one_may_be_starting(
    capsys: pytest.CaptureFixture[str], profile: str
) -> None:
    assert main(["stop", profile]) == 0
    assert "no run is under way. One that has only just begun" in capsys.readouterr().out
