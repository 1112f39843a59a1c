"""A server's process: started in a session of its own, watched, and ended without a trace.

Between us and it stands a keeper (keeper.py), which ends the whole group when we are gone, even by SIGKILL.
Should the keeper be killed as well, the state file lets the next run find what is left: by pid and creation
time and by the mark in its environment, never by the name of a program.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from promptmill.errors import ConfigError, LaunchFailed
from promptmill.serving.keeper import LIFE_MARK, run_cleanup

_KEEPER = Path(__file__).with_name("keeper.py")
_KEEPER_START_S = 30.0
_KEEPER_END_S = 75.0  # the keeper gives leftovers 5 s and the cleanup command 60
_KEEPER_HUNG_UP_S = 5.0
_PORT_FREE_S = 10.0
_KILLED_S = 5.0
_NOBODY = (0, 0.0)
# setproctitle, by which SGLang names its processes, overwrites their environment otherwise.
_MARK_STAYS = {"SPT_NOENV": "1"}


class ServerProcess:
    """One life of a server. Owns the keeper and the thread that reads its events."""

    def __init__(self, name: str, command: Sequence[str], log: Path, state_folder: Path) -> None:
        self.name = name
        self.command = list(command)
        self.log = log
        self.pid = 0
        self.exit_status: int | None = None
        """As subprocess gives it, negative for a signal; None while the process lives."""
        self._mark = f"{name}-{uuid.uuid4().hex[:8]}"  # a name may be given twice, by two runs
        self._state = state_folder / f"{name}.json"
        self._cleanup: list[str] = []
        self._files: dict[str, str] = {}
        self._cleaned = False
        self._started = threading.Event()
        self._ended = threading.Event()
        self._problem = ""

    def start(
        self,
        env: Mapping[str, str] | None = None,
        cleanup: Sequence[str] = (),
        secrets: Sequence[str] = (),
        files: Mapping[Path, str] | None = None,
    ) -> None:
        """`secrets` are kept out of the log; `files` are there for the owner's eyes only, and while it lives.

        Raises LaunchFailed where the command cannot be executed.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._cleanup = [part.replace("{name}", self.name) for part in cleanup]
        self._files = {str(path): text for path, text in (files or {}).items()}
        self._remember(None)
        argv = [str(_KEEPER), self.name, str(self.log), json.dumps(self._cleanup), *self.command]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**(os.environ if env is None else env), LIFE_MARK: self._mark, **_MARK_STAYS},
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_events, name=f"keeper-{self.name}", daemon=True)
        self._reader.start()
        try:
            orders = {"secrets": list(secrets), "files": self._files, "state": str(self._state)}
            self._tell(json.dumps(orders))
            if not self._started.wait(_KEEPER_START_S) or not self.pid:
                raise LaunchFailed(f"the server could not be started: {self._problem or 'no answer'}.")
            self._remember(self.pid)
        except BaseException:  # interrupted, too: nobody else knows of it yet
            self._hang_up()
            self._join()
            raise

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after at most `timeout_s`."""
        return self._ended.wait(timeout_s)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s`, SIGKILL to the group; returns when nothing of it is left."""
        self._tell(f"stop {grace_s}")
        if not self._ended.wait(grace_s + _KEEPER_END_S):
            self._hang_up()
        self._join()

    def kill(self) -> None:
        """SIGKILL the main process, as a crash would. Nothing else is told."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def _read_events(self) -> None:
        assert self._keeper.stdout is not None
        status = None
        for line in self._keeper.stdout:
            event = json.loads(line)
            self.pid = event.get("pid", self.pid)
            self._problem = event.get("failed", self._problem)
            status = event.get("exit", status)
            self._cleaned = event.get("cleaned", "failed" in event)
            self._started.set()
        self._keeper.wait()
        if status is None and not self._problem:  # it was killed itself: nobody else will end the server
            _, self._cleaned = _end_life(self._mark, self.pid, self._cleanup, list(self._files))
        self.exit_status = status if status is not None else -signal.SIGKILL
        self._started.set()
        self._ended.set()

    def _tell(self, line: str) -> None:
        with suppress(OSError, ValueError):  # the keeper is gone already
            assert self._keeper.stdin is not None
            self._keeper.stdin.write(line + "\n")
            self._keeper.stdin.flush()

    def _hang_up(self) -> None:
        """End a keeper that does not answer; to it, the end of its input is the loss of its owner."""
        with suppress(OSError):
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
        if not self._ended.wait(_KEEPER_HUNG_UP_S):
            self._keeper.kill()

    def _join(self) -> None:
        self._reader.join(timeout=10)
        for stream in (self._keeper.stdin, self._keeper.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._keeper.wait()
        if self._cleaned:  # else the next run tries once more
            self._state.unlink(missing_ok=True)

    def _remember(self, pid: int | None) -> None:
        """What a later run has to know, should nobody be left to end this life."""
        with suppress(psutil.NoSuchProcess):  # it died already; its end is read from the keeper
            state = {
                "mark": self._mark,
                "server": _identify(pid) if pid else _NOBODY,
                "owner": _identify(os.getpid()),
                "cleanup": self._cleanup,
                "remove": list(self._files),
            }
            # Not by way of a scratch file, which a kill would leave. A torn state is one whose keeper lives.
            self._state.parent.mkdir(parents=True, exist_ok=True)
            self._state.write_text(json.dumps(state), encoding="utf-8")


def end_leftovers(state_folder: Path) -> list[str]:
    """End what is left of runs that are gone, keeper and all; returns the names.

    A process whose owner is alive is left alone, and so is one that was given the pid of a dead one.
    """
    ended = []
    for state in sorted(state_folder.glob("*.json")):
        try:
            saved = json.loads(state.read_text("utf-8"))
            if _is_alive(saved["owner"]):
                continue
            main = saved["server"][0] if _is_alive(saved["server"]) else 0
            found, _ = _end_life(
                saved.get("mark", state.stem), main, saved.get("cleanup", []), saved.get("remove", [])
            )
            if found:
                ended.append(state.stem)
        except (ValueError, KeyError, TypeError):
            pass  # torn or foreign: nothing can be learned from it
        state.unlink(missing_ok=True)
    return ended


def _end_life(mark: str, pgid: int, cleanup: list[str], remove: list[str]) -> tuple[bool, bool]:
    """What the keeper would have done: the group (0: its leader is gone), what left it, and the cleanup.

    What left the group by setsid has the life's mark in its environment. Returns whether anything lived, and
    whether the cleanup succeeded.
    """
    found = bool(pgid)
    if pgid:
        end_group(pgid)
    deadline = time.monotonic() + _KILLED_S
    while (alive := _marked(mark)) and time.monotonic() < deadline:
        found = True
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=1)  # and look again: one of them may have started another
    for path in remove:
        Path(path).unlink(missing_ok=True)
    return found, run_cleanup(cleanup)


def _marked(mark: str) -> list[psutil.Process]:
    """Everything that lives and has this life's mark: the keeper, too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(LIFE_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _identify(pid: int) -> tuple[int, float]:
    """A process for good: pids are given again, creation times are not."""
    return pid, psutil.Process(pid).create_time()


def _is_alive(identity: list[float]) -> bool:
    pid, created = identity
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(pid))
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_group(pgid: int) -> None:
    """SIGKILL the process group that `pgid` leads."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signal.SIGKILL)


def wait_port_free(port: int) -> bool:
    """Whether nothing listens on `port` any more, after at most ten seconds."""
    deadline = time.monotonic() + _PORT_FREE_S
    while time.monotonic() < deadline:
        try:
            choose_port(port)
            return True
        except ConfigError:
            time.sleep(0.05)  # nobody tells when the kernel lets a port go
    return False


def choose_port(wanted: int) -> int:
    """`wanted` if nothing listens there, or a free one for 0. Raises ConfigError for a port that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise ConfigError(
                f"server.port {wanted}: {error.strerror}. Something else uses it; choose another, "
                "or 0 for a free one."
            ) from None
        return int(probe.getsockname()[1])
