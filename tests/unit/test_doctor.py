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
