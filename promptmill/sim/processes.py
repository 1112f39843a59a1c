"""The process tree: children with SGLang's titles, and its own way of ending them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import psutil  # at the top: a signal handler that imports what is just being imported fails

from promptmill.sim.logs import Log

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def fork(title: str, body: Callable[[], int]) -> int:
    """Run `body` in a child named `title` that dies with this process; returns its pid.

    A fork and no exec: it is there at once. The caller has no threads yet.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        _die_with_parent(parent)
        set_title(title)
        status = body()
    except BrokenPipeError:  # the parent is gone
        status = 1
    except Exception:  # noqa: BLE001 - the simulator's own fault: whoever runs it has to see it
        traceback.print_exc()
    finally:
        os._exit(status)


def idle() -> int:
    """The body of a child that is there to be seen."""
    while True:
        signal.pause()


def set_title(title: str) -> None:
    """What ps and psutil show, as setproctitle does it: the name, and argv overwritten in place."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, title.encode()[:15], 0, 0, 0)
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    if 0 < start < end:
        text = title.encode()[: end - start - 1]
        ctypes.memmove(start, text + bytes(end - start - len(text)), end - start)


def kill_process_tree(log: Log, include_parent: bool) -> None:
    """Kill all children and, with `include_parent`, this process: it ends with status -9."""
    pid = os.getpid()
    if not log.old:
        log.info(f"kill_process_tree called: parent_pid={pid}, include_parent={include_parent}, pid={pid}")
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    if include_parent:
        os.kill(pid, signal.SIGKILL)
        time.sleep(10)


def exit_code(pid: int) -> int | None:
    """Reap a child: its status as subprocess counts it, None while it lives."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -1
    return os.waitstatus_to_exitcode(status) if done else None


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
