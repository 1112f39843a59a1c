"""One server as the run sees it: launched by us for one life, or somebody else's at an address."""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import httpx
import psutil

from promptmill.model import Model
from promptmill.serving import command
from promptmill.serving.liveness import Loss
from promptmill.serving.process import ServerProcess, choose_port, wait_port_free
from promptmill.settings import FlagValue, Profile

_TAIL_BYTES = 64_000
_ABORT_TIMEOUT_S = 2.0
_ANSWER_S = 3.0  # a healthy SGLang takes one
_SCHEDULER = "sglang::sched"  # what setproctitle leaves of it in 15 characters is enough


@dataclass(slots=True)
class Server:
    """An address, and the process behind it if it is ours."""

    name: str
    """The life's name; a launched server answers to it as its model name, so no other can be taken for it."""
    url: str
    api_key: str = field(repr=False)
    process: ServerProcess | None = None
    port: int = 0
    flags: dict[str, FlagValue] = field(default_factory=dict)
    """What this life was launched with, remedies included."""
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    aborts: bool = False
    """It knows /abort_request: running requests end at once, so that SIGTERM need not wait for them."""
    exit_status: int | None = None
    """Of a process that ended by itself before the gate; None for one that was ended by us."""
    _schedulers: list[psutil.Process] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.alive

    def note_schedulers(self) -> None:
        """Remember SGLang's scheduler processes, now that they are up. Those of a container are not seen."""
        if self.process is None or not self.process.pid:
            return
        with suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children(recursive=True)
            self._schedulers = [child for child in children if _is_scheduler(child)]

    def scheduler_lost(self) -> bool:
        """Whether a scheduler is gone while the main process may still answer HTTP."""
        return not all(_is_running(scheduler) for scheduler in self._schedulers)

    def log_tail(self, lines: int = 8) -> list[str]:
        """The last lines of its log; reads a bounded piece, however long the log is."""
        return read_tail(self.process.log, lines) if self.process else []

    def stop(self, grace_s: float) -> None:
        """End the process and whatever it started; its port is free then. Somebody else's is left alone."""
        if self.process is None:
            return
        if self.aborts and grace_s and self.process.alive:
            self._abort_all()
        self.process.stop(grace_s)
        if self.port:
            wait_port_free(self.port)

    def _abort_all(self) -> None:
        """SGLang drains without a time limit: what nobody waits for is not to be waited for."""
        headers = {"Authorization": f"Bearer {self.api_key}"}
        with suppress(httpx.HTTPError), httpx.Client(trust_env=False, timeout=_ABORT_TIMEOUT_S) as http:
            http.post(f"{self.url}/abort_request", json={"abort_all": True}, headers=headers)


@dataclass(frozen=True, slots=True)
class Lost:
    """A server that had passed the gate is gone or stuck."""

    server: Server
    loss: Loss
    answers: int
    """Answers that it finished."""
    in_flight: int = 0
    last: bool = True
    """No other is left."""
    quarantined: tuple[str, ...] = ()
    """Of the prompt that was on trial twice: recorded as failed, or asked again without the tokens it had."""


def launch(
    profile: Profile,
    model: Model,
    folder: Path,
    life: int,
    flags: Mapping[str, FlagValue] | None = None,
    env: Mapping[str, str] | None = None,
) -> Server:
    """Start a life, with its log and state file below `folder`.

    `flags` and `env` stand for the profile's where a remedy changed them. Raises ConfigError for a port that
    is taken, LaunchFailed for a command that is wrong.
    """
    folder = folder.resolve()  # the key file's path is read elsewhere, too: inside a container
    port = choose_port(profile.server.port)
    name = f"promptmill-{datetime.now(UTC):%Y%m%dT%H%M%S}-{life}-{secrets.token_hex(3)}"
    this = command.Life(name, port, _new_key(), folder)
    flags = dict(profile.server.flags if flags is None else flags)
    built = command.build_command(profile, model, this, flags, profile.server.env if env is None else env)
    process = ServerProcess(name, built.argv, folder / f"{name}.log", folder)
    process.start(
        built.env,
        profile.server.cleanup,
        command.secrets(profile, this) if built.files else (),
        built.files,
    )
    aborts = profile.server.engine == "sglang"
    return Server(name, f"http://127.0.0.1:{port}", this.key, process, port, flags, aborts=aborts)


def foreign(profile: Profile, url: str) -> Server:
    """A server that somebody else runs."""
    key = os.environ.get(profile.server.api_key_env, "") if profile.server.api_key_env else ""
    return Server(name=url, url=url.rstrip("/").removesuffix("/v1"), api_key=key)


def answers(url: str, path: str) -> bool:
    """Whether somebody else's server answers there within a few seconds, be it to ask for a key."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        return httpx.get(f"{base}{path}", timeout=_ANSWER_S, trust_env=False).status_code < 500
    except httpx.HTTPError:
        return False


def read_tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a file of any length, or nothing where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=lines))


def _new_key() -> str:
    """Neither a flag to argparse, which may find it behind --api-key, nor a number to YAML."""
    return f"key-{secrets.token_hex(24)}"


def _is_scheduler(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.name().startswith(_SCHEDULER)
    return False


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
