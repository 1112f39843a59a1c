"""GPUs of this host, told by a stand-in for nvidia-smi."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from promptmill import events
from promptmill.errors import LaunchFailed
from promptmill.serving.gpus import Gpu, gpus, hardware, wait_until_free

SCRIPT = """#!/bin/sh
case "$1" in
*gpu=*) cat "{folder}/gpus" ;;
*) echo "4242, /opt/other/python, 71000" ;;
esac
"""
IDLE = "0, NVIDIA H200, 4, 143771\n1, NVIDIA H200, 600, 143771\n"
BUSY = "0, NVIDIA H200, 4, 143771\n1, NVIDIA H200, 71680, 143771\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """nvidia-smi on the path, and what it says."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SCRIPT.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("promptmill.serving.gpus._POLL_S", 0.0)

    def says(text: str) -> None:
        (tmp_path / "gpus").write_text(text)

    return says


def test_gpus_are_read_and_named(smi: Callable[[str], None]) -> None:
    smi(IDLE)
    assert gpus({})[1] == Gpu("1", "NVIDIA H200", 600 / 1024, 143771 / 1024)
    assert hardware({}) == "2 x NVIDIA H200"
    assert hardware({"CUDA_VISIBLE_DEVICES": "0"}) == "1 x NVIDIA H200"
    assert hardware({"CUDA_VISIBLE_DEVICES": "GPU-8932f937"}) == "2 x NVIDIA H200"


def test_host_without_gpus_has_none_and_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus({}) == []
    assert hardware({}) == "no GPU seen"
    wait_until_free(0.0, {})


@pytest.mark.parametrize("text", ["", "garbage\n", "0, NVIDIA GB10, [N/A], [N/A]\n"])
def test_what_nvidia_smi_does_not_tell_is_no_gpu(smi: Callable[[str], None], text: str) -> None:
    smi(text)
    assert gpus({}) == []


def test_memory_in_use_is_waited_for_and_told_once(smi: Callable[[str], None]) -> None:
    smi(BUSY)
    told: list[str] = []

    def free_it(event: events.Event) -> None:
        told.append(str(event))
        smi(IDLE)

    with events.listening(free_it):
        wait_until_free(30.0, {})
    assert told == ["waiting for GPU memory: GPU 1 70.0 of 140.4 GiB"]


def test_memory_that_stays_in_use_is_refused_with_its_holder(smi: Callable[[str], None]) -> None:
    smi(BUSY)
    with pytest.raises(LaunchFailed, match=r"GPU 1 70\.0 of 140\.4 GiB, held by pid 4242") as refused:
        wait_until_free(0.0, {})
    assert refused.value.signature == "unbalanced"
    wait_until_free(0.0, {"CUDA_VISIBLE_DEVICES": "0"})
