"""What is wrong is said in one paragraph on standard error, with status 2, before anything is started."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

import pytest
from place import Place


def complaint(place: Place, *arguments: str) -> str:
    """Standard error of `promptmill run`, which must have refused to start."""
    done = place.run("promptmill", "run", *arguments, timeout_s=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("promptmill: ")
    assert done.stderr.count("\n") == 1, "more than one paragraph"
    assert place.processes() == []
    return done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("server.prot=1", "there is no setting 'prot'. Did you mean 'port'?"),
        ("server.port=often", "server.port: Input should be a valid integer"),
        ("partitions.C_none.format=text", "there is no partition 'C_none'. Known: A_text, B_turns."),
        ("partitions.A_text.source=nothere.jsonl", "partition A_text: source 'nothere.jsonl'"),
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
        ("server.engine=sglang", "has no sglang"),
        ("server.flags.ctx-size=none", "server.flags.ctx-size"),
    ],
)
def test_bad_setting_is_explained(small: Place, override: str, words: str) -> None:
    assert words in complaint(small, "small.toml", "--set", override)


def test_bad_environment_variable_is_explained(small: Place) -> None:
    small.env["PROMPTMILL_SERVER__PROT"] = "8000"
    assert "environment variable PROMPTMILL_SERVER__PROT" in complaint(small, "small.toml")


def test_missing_profile_names_those_that_exist(small: Place) -> None:
    assert "Known: demo" in complaint(small, "nightly-typo")
    assert "no such file" in complaint(small, "nothere.toml")


def test_torn_profile_names_the_line(small: Place) -> None:
    (small.folder / "torn.toml").write_text('model = "x"\n[server\n', encoding="utf-8")
    assert "line 2" in complaint(small, "torn.toml")


def test_taken_port_is_named_and_the_stranger_hears_nothing(small: Place) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        stranger.setblocking(False)
        port = stranger.getsockname()[1]
        assert f"server.port {port}" in complaint(small, "small.toml", "--set", f"server.port={port}")
        with pytest.raises(BlockingIOError):
            stranger.accept()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_is_explained(small: Place) -> None:
    disk = small.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount")
    try:
        words = complaint(small, "small.toml", "--set", "store.url=disk/store")
        assert "disk/store: 0.00 GiB of disk are free" in words
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", str(disk)], check=True)


def test_plan_and_status_of_a_bad_profile_end_the_same_way(small: Place) -> None:
    for command in ("plan", "status", "show", "stop", "settings"):
        done = small.run("promptmill", command, "small.toml", "--set", "server.prot=1", timeout_s=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Did you mean 'port'?" in done.stderr
