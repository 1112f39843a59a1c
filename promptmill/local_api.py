"""A Prefect API for one run, where none is configured.

Prefect would start one by itself; it would print its start-up quarrels with SQLite on the terminal, and
outlive a run that is killed. This one writes to a log file, starts while we still import, and its keeper ends
it with us.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import httpx

from promptmill.errors import PromptmillError
from promptmill.serving.process import ServerProcess, choose_port
from promptmill.serving.server import read_tail

_START_S = 180.0
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
_EPHEMERAL = {
    "PREFECT_UI_ENABLED": "0",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    **QUIET,
}


class LocalApi:
    """`start` returns at once; `wait` when it answers. `stop` leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        port = choose_port(0)
        self.url = f"http://127.0.0.1:{port}/api"
        command = [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error", "--lifespan", "on"]
        self._process = ServerProcess(f"prefect-api-{port}", command, folder / "prefect-api.log", folder)

    def start(self) -> None:
        self._process.start({**os.environ, **_EPHEMERAL})

    def wait(self) -> None:
        """Raises PromptmillError, with the log's end."""
        deadline = time.monotonic() + _START_S
        with httpx.Client(trust_env=False, timeout=5) as http:
            while self._process.alive and time.monotonic() < deadline:
                try:
                    if http.get(f"{self.url}/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                self._process.wait(0.1)
        tail = "\n".join(f"  {line}" for line in read_tail(self._process.log, 5))
        raise PromptmillError(f"Prefect's API did not start; its log ({self._process.log}) ends:\n{tail}")

    def stop(self) -> None:
        self._process.stop(grace_s=5)


def is_wanted() -> bool:
    """Whether no API is configured, as far as can be told without importing Prefect (which takes seconds)."""
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect").expanduser()
    configured = [home / "profiles.toml", Path("prefect.toml"), Path(".env")]
    if any(path.is_file() for path in configured):
        from prefect.settings import PREFECT_API_URL  # noqa: TID251  asked only where there is a configuration

        return not PREFECT_API_URL.value()
    return not os.environ.get("PREFECT_API_URL")
