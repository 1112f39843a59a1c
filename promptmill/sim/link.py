"""Messages between the two processes: JSON, one a line, over a socket pair."""

from __future__ import annotations

import select
import socket
from typing import Any

import orjson


class Link:
    """The scheduler's end, used without an event loop."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        """Raises BrokenPipeError when the other end is gone."""
        try:
            self.sock.sendall(orjson.dumps(message) + b"\n")
        except ConnectionError as error:
            raise BrokenPipeError from error

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """What has arrived, after waiting at most so long. Raises BrokenPipeError at the end."""
        ready, _, _ = select.select([self.sock], [], [], max(0.0, timeout_s))
        if not ready:
            return []
        try:
            data = self.sock.recv(1 << 20)
        except ConnectionError as error:
            raise BrokenPipeError from error
        if not data:
            raise BrokenPipeError
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [orjson.loads(line) for line in lines]
