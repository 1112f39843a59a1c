"""`promptmill doctor`: findings, and what stops a run."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from promptmill.cli import main
from promptmill.serving.worked import Remedy, WorkedRemedies
from tests.contract.sglang_place import Engine, sim_model

COMMAND = str(Path(sys.executable).with_name("promptmill"))
FLAGS = {"tp": 8, "mem-fraction-static": 0.93, "cuda-graph-max-bs": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sim_model(tmp_path_factory.mktemp("model"))


def examined(
    capsys: pytest.CaptureFixture[str], model: Path, folder: Path, *sets: str, **flags: Any
) -> tuple[int, str]:
    path = Engine([COMMAND, "sim"], model, flags=FLAGS).write_profile(folder, **flags)
    status = main(["doctor", str(path), *(part for value in sets for part in ("--set", value))])
    return status, capsys.readouterr().out


def test_doctor_prints_the_exact_command_and_no_key(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    status, out = examined(capsys, model, tmp_path)
    assert status == 0
    (command,) = (line for line in out.splitlines() if " command: " in line)
    assert "promptmill sim --model-path" in command
    assert "--tp-size 8" in command
    assert "--cuda-graph-max-bs-decode 64" in command
    assert "--served-model-name NAME" in command
    assert "nothing stands in the way" in out
    assert list(tmp_path.glob("store/servers/*")) == []


def test_doctor_shows_remedies_that_will_be_used(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptmill.serving.supervisor._remembered_for", lambda profile, model: "here")
    (tmp_path / "store").mkdir()
    remedy = Remedy("mem-fraction-static", 0.93, 0.88, "CUDA out of memory")
    WorkedRemedies(tmp_path / "store/remedies.json").keep("here", [remedy])
    _, out = examined(capsys, model, tmp_path)
    assert "as in an earlier run: mem-fraction-static 0.93 → 0.88 (CUDA out of memory)" in out
    assert "--mem-fraction-static 0.88" in out


def test_doctor_warns_of_another_kv_type(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    status, out = examined(capsys, model, tmp_path, **{"kv-cache-dtype": "fp8_e4m3"})
    assert status == 0
    assert "KV cache: fp8_e4m3 gives other answers" in out


@pytest.mark.parametrize(
    ("sets", "flags", "words"),
    [
        ((), {"api-key": "x"}, "api-key"),
        ((), {"kv-cache-dtype": "fp4_e2m1"}, "no 'fp4_e2m1'"),
        (("server.command=['no-such-program']",), {}, "no-such-program"),
        (("partitions.A_text.source=gone.jsonl",), {}, "gone.jsonl"),
        (("server.max_in_flight=10000000",), {}, "files may be open"),
        (("model_path=/no/such/folder",), {}, "/no/such/folder"),
    ],
)
def test_doctor_names_what_would_stop_a_run_and_ends_with_status_2(
    capsys: pytest.CaptureFixture[str],
    model: Path,
    tmp_path: Path,
    sets: tuple[str, ...],
    flags: dict[str, Any],
    words: str,
) -> None:
    status, out = examined(capsys, model, tmp_path, *sets, **flags)
    assert status == 2
    assert any(line.startswith("wrong") and words in line for line in out.splitlines()), out
    assert "to mend before a run" in out


def test_doctor_leaves_nothing_behind(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hello"}\n')
    before = sorted(tmp_path.rglob("*"))
    place = tmp_path / "not" / "there"
    status, out = examined(
        capsys, model, tmp_path, f"store.url={place}/store", f"release.url={place}/release"
    )
    assert status == 0, out
    assert f"{place}/release: an object was written, read, listed and deleted" in out
    assert sorted(tmp_path.rglob("*")) == sorted({*before, tmp_path / "profile.toml"})


def test_doctor_reads_the_first_rows_and_says_which_cannot_be_asked(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    profile = Engine([COMMAND, "sim"], model, flags=FLAGS).write_profile(tmp_path)
    rows = ['{"prompt": "Hello"}', '{"prompt": "%s"}' % ("long " * 3000), "{no json"]
    (tmp_path / "a.jsonl").write_text("\n".join(rows * 100) + "\n")
    assert main(["doctor", str(profile)]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if " prompts: " in line)
    assert line.startswith("note")
    assert "A_text: the first 200: 67 of 200 rows can be asked, the longest with " in line
    assert "67 too_long" in line
    assert "66 bad_json" in line
    assert "a.jsonl:2: too_long" in line


def test_doctor_goes_on_without_a_model_and_names_every_missing_source(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    profile = Engine([COMMAND, "sim"], model, flags=FLAGS).write_profile(tmp_path)
    more = '[[partitions]]\nname = "{0}"\nsource = "{0}.jsonl"\n'
    text = profile.read_text() + more.format("gone_1") + more.format("gone_2")
    profile.write_text(text.replace(f'model_path = "{model}"', 'model_path = "/no/such/model"'))
    assert main(["doctor", str(profile)]) == 2
    out = capsys.readouterr().out
    assert "wrong  model: model_path '/no/such/model'" in out
    assert "partition gone_1: source 'gone_1.jsonl'" in out
    assert "partition gone_2: source 'gone_2.jsonl'" in out
    assert "A_text: the source is there" in out
    assert "command: " in out
    assert "--model-path /no/such/model" in out
    assert "release: " in out


@pytest.mark.parametrize(
    ("command", "words"),
    [("/no/such/python", "there is no such file"), ("no-such-program", "it is not on the path")],
)
def test_doctor_says_of_a_command_what_is_missing(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, command: str, words: str
) -> None:
    status, out = examined(capsys, model, tmp_path, f"server.command=['{command}']")
    assert status == 2
    assert f"server.command: '{command}': {words}" in out


def test_doctor_says_of_s3_what_to_look_at_and_no_secret(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-word")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("AWS_REGION", "eu-central-1")
        status, out = examined(capsys, model, tmp_path, "release.url=s3://bucket/prefix")
    assert status == 2
    assert "S3: endpoint: http://127.0.0.1" in out
    assert "region: eu-central-1" in out
    (line,) = (line for line in out.splitlines() if line.startswith("wrong  release"))
    assert "s3://bucket/prefix cannot be written to" in line
    assert "see AWS_ENDPOINT_URL" in line
    assert "hidden-word" not in out


def test_doctor_finds_a_taken_port(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        status, out = examined(capsys, model, tmp_path, f"server.port={stranger.getsockname()[1]}")
    assert status == 2
    assert "server.port" in out


def test_sim_is_started_with_sglangs_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "--model-path", "none", "--no-such-flag", "1"])
    assert ended.value.code == 2
    assert "no-such-flag" in capsys.readouterr().err


def test_other_commands_still_refuse_what_they_do_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "demo", "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
