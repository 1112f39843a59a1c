"""The GPUs of this host, as nvidia-smi tells them; a host without it has none to look at."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from promptmill import events
from promptmill.errors import LaunchFailed

_QUERY_S = 20.0
_POLL_S = 1.0
_BUSY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Gpu:
    index: str
    name: str
    used_gib: float
    total_gib: float

    @property
    def busy(self) -> bool:
        """More is in use than a driver and a display take."""
        return self.used_gib > _BUSY_SHARE * self.total_gib


def gpus(env: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES lets a server see, where it names indexes; else all."""
    rows = _ask("--query-gpu=index,name,memory.used,memory.total")
    found = [Gpu(r[0], r[1], float(r[2]) / 1024, float(r[3]) / 1024) for r in rows if len(r) == 4]
    visible = [part.strip() for part in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    if not visible or not all(map(str.isdigit, visible)):
        return found
    return [gpu for gpu in found if gpu.index in visible]


def hardware(env: Mapping[str, str] = os.environ) -> str:
    """What remedies are remembered for, e.g. `8 x NVIDIA H200`."""
    found = gpus(env)
    names = sorted({gpu.name for gpu in found})
    return f"{len(found)} x {' + '.join(names)}" if found else "no GPU seen"


def wait_until_free(timeout_s: float, env: Mapping[str, str] = os.environ) -> None:
    """Wait for GPU memory that is still in use: a dead server's takes up to a minute to come back.

    Raises LaunchFailed, with who uses it, after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    told = False
    while busy := [gpu for gpu in gpus(env) if gpu.busy]:
        if time.monotonic() >= deadline:
            raise LaunchFailed(_complaint(busy, timeout_s), signature="unbalanced")
        if not told:
            told = True
            events.tell(events.Notice(f"waiting for GPU memory: {_shown(busy)}"))
        time.sleep(_POLL_S)  # nvidia-smi tells when it is asked, and never by itself


def _complaint(busy: list[Gpu], timeout_s: float) -> str:
    holders = [
        f"pid {r[0]} ({r[1]}, {float(r[2]) / 1024:.1f} GiB)"
        for r in _ask("--query-compute-apps=pid,process_name,used_memory")
        if len(r) == 3
    ]
    by = ", held by " + ", ".join(holders) if holders else ""
    return (
        f"GPU memory is still in use after {timeout_s:g} s: {_shown(busy)}{by}. It is none of promptmill's "
        "servers; end it, choose other GPUs (server.env CUDA_VISIBLE_DEVICES), or set server.gpu_wait_s = 0."
    )


def _shown(busy: list[Gpu]) -> str:
    return ", ".join(f"GPU {g.index} {g.used_gib:.1f} of {g.total_gib:.1f} GiB" for g in busy)


def _ask(query: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        command = [program, query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode != 0:
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if not any("N/A" in cell for cell in row)]
