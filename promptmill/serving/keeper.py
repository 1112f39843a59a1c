"""The keeper: a tiny process between us and a server. It sees to it that no server outlives its owner.

    python keeper.py NAME LOG CLEANUP_JSON COMMAND…

It runs COMMAND in a session of its own with its output in LOG, and listens on standard input. The first line
is JSON: {"secrets": words that LOG must not hold, "remove": files to delete when it is over}. The line
`stop SECONDS` means SIGTERM to the main process and SIGKILL to the group after that many seconds; the end of
the stream means that the owner is gone, by whatever signal, and ends the group at once. Whatever the command
left behind is killed, then CLEANUP runs. Events go to standard output as JSON lines: {"pid": …},
{"exit": status}. Everything below COMMAND has PROMPTMILL_LIFE=NAME in its environment, so that it can be
found when the keeper itself was killed. Standard library only: it starts in a moment and costs nothing while
it waits.
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
_LOG_DRAINED_S = 2.0


def main() -> int:
    name, log, cleanup, command = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    _adopt_descendants()
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    # SIGTERM to the keeper itself is answered like the loss of its owner.
    signal.signal(signal.SIGTERM, lambda *_: events.put("gone"))
    if not (first := sys.stdin.readline()):
        return 1  # the owner is gone already
    orders = json.loads(first)
    with Path(log).open("ab", buffering=0) as output:
        pump = _Pump(output, orders["secrets"])
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=pump.target,
                stderr=subprocess.STDOUT,
                env={**os.environ, LIFE_MARK: name},
                start_new_session=True,
                restore_signals=True,
                preexec_fn=_default_signals,
            )
        except OSError as error:
            _say({"failed": f"{command[0]}: {error.strerror}"})
            return 1
        pump.start()
        _say({"pid": child.pid})
        threading.Thread(target=_listen, args=(events,), daemon=True).start()
        threading.Thread(target=_wait, args=(child, events), daemon=True).start()
        _serve(child, events)
        _end_group(child.pid)
        pump.join()
    if cleanup:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(cleanup, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    for path in orders["remove"]:
        Path(path).unlink(missing_ok=True)
    _say({"exit": child.returncode})
    return 0


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
