"""The keeper: a tiny process between us and a server. It sees to it that no server outlives its owner.

    python keeper.py NAME LOG CLEANUP_JSON COMMAND…

It runs COMMAND in a session of its own with its output in LOG, and listens on standard input. The first line
is JSON: {"secrets": words that LOG must not hold, "files": {path: text}, which only their owner may read and
which are there as long as COMMAND is, "state": the file to delete when nothing is left}. The line
`stop SECONDS` means SIGTERM to the main process and SIGKILL to the group after that many seconds; the end of
the stream means that the owner is gone, by whatever signal, and ends the group at once. Whatever the command
left behind is killed, then CLEANUP runs. Events go to standard output as JSON lines: {"pid": …},
{"exit": status, "cleaned": whether CLEANUP succeeded}. The owner has put a mark of this life into
the environment as PROMPTMILL_LIFE, so that everything is found when the keeper itself was killed. Standard
library only: it starts in a moment and costs nothing while it waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

LIFE_MARK = "PROMPTMILL_LIFE"
_PR_SET_CHILD_SUBREAPER = 36
_LEFTOVERS_S = 5.0
_CLEANUP_S = 60.0
_LOG_DRAINED_S = 2.0


def main() -> int:
    log, cleanup, command = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    _adopt_descendants()
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    # SIGTERM to the keeper itself is answered like the loss of its owner.
    signal.signal(signal.SIGTERM, lambda *_: events.put("gone"))
    if not (first := sys.stdin.readline()).endswith("\n"):
        return 1  # the owner is gone already
    orders = json.loads(first)
    try:
        for path, text in orders["files"].items():
            _write_private(Path(path), text)
        child = _live(command, log, orders["secrets"], events)
    except OSError as error:
        _say({"failed": f"{error.filename or command[0]}: {error.strerror}"})
        return 1
    finally:
        for path in orders["files"]:
            Path(path).unlink(missing_ok=True)
    cleaned = run_cleanup(cleanup)
    if cleaned:
        Path(orders["state"]).unlink(missing_ok=True)
    _say({"exit": child.returncode, "cleaned": cleaned})
    return 0


def _live(
    command: list[str], log: str, secrets: list[str], events: queue.SimpleQueue[str]
) -> subprocess.Popen[bytes]:
    """One life, until nothing of it is left. Raises OSError for a command that cannot be executed."""
    with Path(log).open("ab", buffering=0) as output:
        pump = _Pump(output, secrets)
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pump.target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            restore_signals=True,
            preexec_fn=_default_signals,
        )
        pump.start()
        _say({"pid": child.pid})
        threading.Thread(target=_listen, args=(events,), daemon=True).start()
        threading.Thread(target=_wait, args=(child, events), daemon=True).start()
        _serve(child, events)
        _end_group(child.pid)
        pump.join()
    return child


def _write_private(path: Path, text: str) -> None:
    """A file that nobody else may read."""
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)


def run_cleanup(command: list[str]) -> bool:
    """Whether it succeeded; true where there is none."""
    if not command:
        return True
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLEANUP_S, check=False
        )
        return done.returncode == 0
    return False


class _Pump:
    """Carries the server's output into its log, less the secrets. Where there are none, the server writes."""

    def __init__(self, output: BinaryIO, secrets: list[str]) -> None:
        self._output = output
        self._secrets = [secret.encode() for secret in secrets if secret]
        self.target: int | BinaryIO = output
        if self._secrets:
            self._source, self.target = os.pipe()
        self._thread = threading.Thread(target=self._carry, daemon=True)

    def start(self) -> None:
        if isinstance(self.target, int):
            os.close(self.target)  # the child has it now
            self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(_LOG_DRAINED_S)

    def _carry(self) -> None:
        held = b""
        while piece := os.read(self._source, 1 << 16):
            text = held + piece
            for secret in self._secrets:
                text = text.replace(secret, b"***")
            keep = self._begun(text)
            held = text[len(text) - keep :]
            with contextlib.suppress(OSError):  # a full disk must not stop the server
                self._output.write(text[: len(text) - keep])
        with contextlib.suppress(OSError):
            self._output.write(held)

    def _begun(self, text: bytes) -> int:
        """Bytes at the end that may be the beginning of a secret."""
        longest = max(map(len, self._secrets)) - 1
        tails = (text[len(text) - n :] for n in range(min(longest, len(text)), 0, -1))
        return next((len(tail) for tail in tails if any(s.startswith(tail) for s in self._secrets)), 0)


def _serve(child: subprocess.Popen[bytes], events: queue.SimpleQueue[str]) -> None:
    """Until the child is gone; what the owner says is done meanwhile."""
    deadline: float | None = None
    while True:
        try:
            event = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            event = "gone"  # the grace is over
        if event == "exited":
            return
        if event == "gone":
            deadline = None
            _signal_group(child.pid, signal.SIGKILL)
        elif event.startswith("stop ") and deadline is None:
            deadline = time.monotonic() + float(event.removeprefix("stop "))
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)


def _listen(events: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        events.put(line.strip())
    events.put("gone")


def _wait(child: subprocess.Popen[bytes], events: queue.SimpleQueue[str]) -> None:
    child.wait()
    events.put("exited")


def _end_group(pgid: int) -> None:
    """Kill what is left of the group, and every descendant that left it: they are our children now."""
    deadline = time.monotonic() + _LEFTOVERS_S
    while time.monotonic() < deadline:
        _signal_group(pgid, signal.SIGKILL)
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)  # children that were just killed are about to be reaped


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _adopt_descendants() -> None:
    """On Linux, orphans among our descendants become our children instead of init's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _default_signals() -> None:
    # What is ignored stays ignored across exec; the server must see its own SIGINT and SIGHUP.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)


def _say(event: dict[str, object]) -> None:
    # Unbuffered: what the owner no longer takes must not be tried again, and complained about, at our exit.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
