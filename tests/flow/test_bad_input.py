"""What is wrong is said in one paragraph on standard error, with status 2, before anything is started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from place import Place, write_small

from promptmill.cli import main

Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """small.toml in a folder, and this process in it: a process for each command would cost seconds."""
    place = Place(tmp_path)
    write_small(tmp_path)
    monkeypatch.chdir(tmp_path)
    wanted = place.environ()
    for name in os.environ.keys() - wanted.keys():
        monkeypatch.delenv(name)
    for name, value in wanted.items():
        monkeypatch.setenv(name, value)
    handler = signal.getsignal(signal.SIGTERM)
    yield place
    signal.signal(signal.SIGTERM, handler)  # `run` sets its own


@pytest.fixture
def refused(here: Place, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Standard error of a command, `run` if none is named, that must have refused to start."""

    def call(*arguments: str, command: str = "run") -> str:
        status = main([command, *arguments])
        said = capsys.readouterr()
        return check_refusal(here, status, said.out, said.err)

    return call


def check_refusal(place: Place, status: int, out: str, err: str) -> str:
    assert status == 2, out + err
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("promptmill: ")
    assert err.count("\n") == 1, "more than one paragraph"
    assert place.processes() == []
    return err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("server.prot=1", "there is no setting 'prot'. Did you mean 'port'?"),
        ("server.port=often", "server.port: Input should be a valid integer"),
        ("partitions.C_none.format=text", "there is no partition 'C_none'. Known: A_text, B_turns."),
        ("partitions.A_text.source=nothere.jsonl", "partition A_text: source 'nothere.jsonl'"),
        ("partitions.A_text.source=.", "partition A_text: source '.' holds "),
        ("partitions.A_text.format=parquet", "Input should be 'auto', 'messages', 'sharegpt', 'text'"),
        ("partitions.A_text.class=huge", "[classes] knows: short"),
        ("partitions.A_text.name=A text", "a name is letters, digits, '.', '_' and '-', not 'A text'."),
        ("model_path=nowhere.gguf", "model_path 'nowhere.gguf'"),
        ("model=./nowhere.gguf", "model './nowhere.gguf'"),
        ("model=embedded:nothere", "the only embedded model is embedded:smollm2"),
        ("chat.template=nothere.jinja", "chat.template 'nothere.jinja'"),
        ("run.min_free_gib=1e9", "run.min_free_gib asks for 1e+09"),
        ("store.url=gs://bucket/x", "gs://bucket/x"),
        ("store.url=a.jsonl", "a.jsonl"),
        ("server.engine=sglang", "is served by server.engine"),
        ("server.flags.ctx-size=none", "server.flags.ctx-size"),
    ],
)
def test_bad_setting_is_explained(refused: Refused, override: str, words: str) -> None:
    assert words in refused("small.toml", "--set", override)


def test_bad_environment_variable_is_explained_by_the_command(here: Place) -> None:
    here.env["PROMPTMILL_SERVER__PROT"] = "8000"
    done = here.run("promptmill", "run", "small.toml")
    words = check_refusal(here, done.returncode, done.stdout, done.stderr)
    assert "environment variable PROMPTMILL_SERVER__PROT" in words


def test_missing_profile_names_those_that_exist(refused: Refused) -> None:
    assert "Known: demo" in refused("nightly-typo")
    assert "no such file" in refused("nothere.toml")


def test_torn_profile_names_the_line(here: Place, refused: Refused) -> None:
    (here.folder / "torn.toml").write_text('model = "x"\n[server\n', encoding="utf-8")
    assert "line 2" in refused("torn.toml")


def test_taken_port_is_named_and_the_stranger_hears_nothing(refused: Refused) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        stranger.setblocking(False)
        port = stranger.getsockname()[1]
        assert f"server.port {port}" in refused("small.toml", "--set", f"server.port={port}")
        with pytest.raises(BlockingIOError):
            stranger.accept()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_is_explained(here: Place, refused: Refused) -> None:
    disk = here.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount")
    try:
        words = refused("small.toml", "--set", "store.url=disk/store")
        assert "disk/store: 0.00 GiB of disk are free" in words
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("command", ["plan", "status", "show", "stop", "settings"])
def test_other_commands_refuse_a_bad_profile_the_same_way(refused: Refused, command: str) -> None:
    assert "Did you mean 'port'?" in refused("small.toml", "--set", "server.prot=1", command=command)
