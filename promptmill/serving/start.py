"""One start of a server: how long it may take, whether it still moves, and the words of a refusal."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from promptmill.errors import LaunchFailed
from promptmill.serving.logs import LogDigest
from promptmill.serving.server import Server
from promptmill.settings import ServerSettings, mask_command

_POLL_S = 0.1
_READ_BYTES = 1 << 20


class Start:
    """Follows the server's log while it is waited for: a start that says something still moves."""

    def __init__(self, server: Server, settings: ServerSettings) -> None:
        self.log = LogDigest()
        """What the log has said so far."""
        self._server = server
        self._settings = settings
        self._began = time.monotonic()
        self._read = 0
        self._grew_at = self._began

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def remaining_s(self) -> float:
        return max(1.0, self._settings.startup_timeout_s - self.elapsed_s)

    def wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        """Until `condition` holds. Raises LaunchFailed where it ends, stands still or is too slow."""
        while not condition():
            self.follow()
            if not self._server.alive:
                status = self._server.process.exit_status if self._server.process else None
                raise self.refusal(f"the process ended with status {status} before it was ready", False)
            if self.elapsed_s > self._settings.startup_timeout_s:
                signature = "no_start_progress" if self._server.process else "unreachable"
                raise self.refusal(f"{problem} within startup_timeout_s", False, signature)
            silent = time.monotonic() - self._grew_at
            if self._server.process is not None and silent > self._settings.startup_silence_timeout_s:
                raise self.refusal(f"its log has not grown for {silent:.0f} s", False, "no_start_progress")
            time.sleep(_POLL_S)  # a server that starts is asked; it calls nobody
        self.follow()

    def follow(self) -> None:
        """Read what is new in the log."""
        if self._server.process is None or not self._server.process.log.exists():
            return
        with self._server.process.log.open("rb") as file:
            file.seek(self._read)
            while piece := file.read(_READ_BYTES):
                self.log.feed(piece)
                self._read += len(piece)
                self._grew_at = time.monotonic()

    def refusal(
        self,
        cause: str,
        permanent: bool = True,
        signature: str = "",
        numbers: dict[str, float] | None = None,
    ) -> LaunchFailed:
        lines = [f"server {self._server.name} is not usable: {cause}.", *last_words(self._server)]
        return LaunchFailed("\n".join(lines), permanent, self._server.name, signature, numbers)


def last_words(server: Server) -> list[str]:
    """The end of its log and the command to run by hand, line by line; nothing where it is not ours."""
    if server.process is None:
        return []
    return [
        f"Its log ({server.process.log}) ends:",
        *(f"  {line[:300]}" for line in server.log_tail()),
        f"To run it by hand: {shlex.join(_without_key(mask_command(server.process.command)))}",
    ]


def _without_key(command: list[str]) -> list[str]:
    """The file with the key is gone when the life is over."""
    at = command.index("--config") if "--config" in command else len(command)
    return command[:at] + command[at + 2 :]
