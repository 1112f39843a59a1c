"""What every engine's client does: one request to a server, token ids in, token ids out, streamed.

Success is a finish reason of stop or length, and nothing else. There is no total time-out: a long answer is
not an error. Foreign exceptions end in the clients and become ours, statuses by the one table here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from promptmill.errors import ConfigError, PromptRejected, ServerBusy, ServerError
from promptmill.settings import SamplingSettings
from promptmill.types import Completion, Message

OnTokens = Callable[[list[int]], None]
_ROW_FAULTS = {400, 413, 422}
_SETUP_FAULTS = {401, 403, 404}
_BUSY = {429, 502, 503, 504}
_LONGEST_WAIT_S = 60.0
# SGLang's words, and those of servers that speak OpenAI's.
_TOO_LONG = re.compile(
    r"longer than|maximum (context|allowed) length|exceeds the KV memory budget", re.IGNORECASE
)


class ConnectionBroke(ServerError):
    """The connection failed or ended early; whether the server died, its owner knows."""


class ConnectionRefused(ConnectionBroke):
    """Nothing listens at the address: with no token moving, that is a dead server."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a server says of its work; None is what it does not tell."""

    running: int | None = None
    """Requests that it works on."""
    queued: int | None = None
    used_tokens: int | None = None
    """KV tokens in use: this moves while the server does."""
    as_of: float | None = None
    """The server's own time of this sample; one that stands still comes from a scheduler that does."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a server is asked for: the answer to these ids."""

    input_ids: list[int]
    sampling: SamplingSettings
    max_new_tokens: int
    sample: int = 0
    key: str = ""
    """Names the prompt to the server."""
    on_trial: bool = False
    """Whoever asks waits for its first token: it is streamed, whatever the settings say."""
    messages: Sequence[Message] = ()
    """What the ids were rendered from, for servers that take no ids."""
    tools: list[dict[str, Any]] | None = None


class Client(Protocol):
    """Of one server. Used in one event loop."""

    async def complete(self, request: Request, on_tokens: OnTokens = ...) -> Completion:
        """Ask once. `on_tokens` gets every group of new ids.

        Raises PromptRejected for a fault of the prompt, ServerBusy, ConfigError for a wrong key or path,
        ConnectionBroke, and ServerError for what else a server may answer.
        """
        ...

    async def load(self) -> Load | None:
        """Its load now, or None where it answered without one. Raises ConnectionBroke."""
        ...

    async def close(self) -> None: ...


def status_error(status: int, words: str, retry_after: str | None = None) -> Exception:
    """The error that an HTTP status stands for; one class, one policy. `retry_after` is that header."""
    if status in _ROW_FAULTS:
        reason = "too_long" if _TOO_LONG.search(words) else "refused_by_server"
        return PromptRejected(reason, f"{status}: {words}")
    if status in _SETUP_FAULTS:
        return ConfigError(f"the server answers {status}: {words} (a wrong key or address, or a proxy?)")
    if status in _BUSY:
        return ServerBusy(f"{status}: {words}", _seconds(retry_after))
    return ServerError(f"{status}: {words}")


def _seconds(retry_after: str | None) -> float:
    """Its other form, a date, is not worth a clock: who says it means minutes."""
    try:
        return min(max(0.0, float(retry_after or 0)), _LONGEST_WAIT_S)
    except ValueError:
        return _LONGEST_WAIT_S
