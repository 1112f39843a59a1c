"""The errors of promptmill: one class, one policy.

PromptmillError
  ConfigError        nothing was started; the message names the setting and the fix
  LockHeld           another run holds the store; this one ends at once
  ServerError
    LaunchFailed     the server never became healthy → remedy or stop
    ServerDied       it was healthy and is gone or stuck now → relaunch and resume
    ServerBusy       alive, refusing → back off and ask again
  PromptRejected     this row's fault: recorded with its reason, never retried
  StoreError         an answer could not be made durable → stop at once
  ReleaseError       nothing visible was published → retry that task alone
"""

from __future__ import annotations


class PromptmillError(Exception):
    """Base of every error that promptmill raises on purpose. Its text is for the user."""


class ConfigError(PromptmillError):
    """A setting, file or environment is wrong; nothing was started."""


class LockHeld(PromptmillError):
    """Another process holds this store."""


class ServerError(PromptmillError):
    """Something is wrong with a model server."""


class LaunchFailed(ServerError):
    """The server never became healthy: cause, log tail and the command to rerun by hand.

    `permanent` says that a relaunch cannot help. `signature` and `numbers` are the gate's own finding, for
    the remedies; empty where only the log can tell.
    """

    def __init__(
        self,
        message: str,
        permanent: bool = False,
        server: str = "",
        signature: str = "",
        numbers: dict[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.permanent = permanent
        self.server = server
        self.signature = signature
        self.numbers = numbers or {}


class ServerDied(ServerError):
    """The server was healthy and is now gone or stuck. Relaunch, then resume from the store."""


class ServerBusy(ServerError):
    """The server is alive and refuses for now; `retry_after_s` is what it asks for, 0 if it says nothing."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PromptRejected(PromptmillError):
    """The server will never answer this prompt. `reason` is a short, countable word."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[PromptRejected], tuple[str, str]]:
        # Two arguments, so the default (args of the base class) would not unpickle.
        return (PromptRejected, (self.reason, self.detail))


class StoreError(PromptmillError):
    """An answer could not be made durable."""


class ReleaseError(PromptmillError):
    """The release was not published; the previous one stays in force. The task may be tried again."""


class ReleaseRefused(ReleaseError):
    """There must be no release yet; trying again changes nothing."""
