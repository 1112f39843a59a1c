"""One server as the run sees it: launched by us for one life, or somebody else's at an address."""

from __future__ import annotations

import os
import secrets
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from promptmill.model import Model
from promptmill.serving.command import build_command
from promptmill.serving.process import ServerProcess, choose_port
from promptmill.settings import Profile

_TAIL_BYTES = 64_000


@dataclass(slots=True)
class Server:
    """An address, and the process behind it if it is ours."""

    name: str
    """The life's name; a launched server answers to it as its model name, so no other can be taken for it."""
    url: str
    api_key: str
    process: ServerProcess | None = None
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def alive(self) -> bool:
        return self.process is None or self.process.alive

    def log_tail(self, lines: int = 8) -> list[str]:
        """The last lines of its log; reads a bounded piece, however long the log is."""
        return read_tail(self.process.log, lines) if self.process else []

    def stop(self, grace_s: float) -> None:
        """End the process and whatever it started. Somebody else's server is left alone."""
        if self.process is not None:
            self.process.stop(grace_s)


def launch(profile: Profile, model: Model, folder: Path, life: int) -> Server:
    """Start a life. Raises ConfigError for a port that is taken, LaunchFailed for a command that is wrong.

    Logs and state files go below `folder`.
    """
    port = choose_port(profile.server.port)
    name = f"promptmill-{datetime.now(UTC):%Y%m%dT%H%M%S}-{life}-{secrets.token_hex(3)}"
    key = secrets.token_urlsafe(24)
    command = build_command(profile, model, name, port, key)
    process = ServerProcess(name, command.argv, folder / f"{name}.log", folder)
    process.start(command.env, profile.server.cleanup)
    return Server(name, f"http://127.0.0.1:{port}", key, process)


def foreign(profile: Profile, url: str) -> Server:
    """A server that somebody else runs."""
    key = os.environ.get(profile.server.api_key_env, "") if profile.server.api_key_env else ""
    return Server(name=url, url=url.rstrip("/").removesuffix("/v1"), api_key=key)


def read_tail(path: Path, lines: int) -> list[str]:
    """The last `lines` lines of a file of any length, or nothing where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    return list(deque(text.splitlines(), maxlen=lines))
