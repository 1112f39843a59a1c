"""A mill is kept served, life after life: launch → gate → serve → diagnose, and launch again.

    for changed in keep_served(run.servers, mill, longest):
        ...  # about once a second

The flow passes Prefect tasks for the steps; without Prefect the supervisor's own do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from promptmill import events
from promptmill.errors import LaunchFailed
from promptmill.generation.mill import Finished, Mill
from promptmill.serving.facts import Facts
from promptmill.serving.remedies import Verdict
from promptmill.serving.server import Lost, Server
from promptmill.serving.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Steps:
    """Of a life; each is given the supervisor first."""

    launch: Callable[[Supervisor], list[Server]] = Supervisor.launch
    gate: Callable[[Supervisor, Server, int], Facts] = Supervisor.pass_gate
    diagnose: Callable[[Supervisor, Lost | LaunchFailed], Verdict] = Supervisor.diagnose


def keep_served(
    servers: Supervisor, mill: Mill, longest_request_tokens: int, steps: Steps = Steps(), look_s: float = 1.0
) -> Iterator[bool]:
    """Until nothing is left to do, or no server can be kept alive: the mill has failed then.

    Yields every `look_s` while it waits, and when something has happened: True where the table of lives has
    changed.
    """
    return _Keeping(servers, mill, longest_request_tokens, steps, look_s).lives()


@dataclass(frozen=True, slots=True)
class _Keeping:
    servers: Supervisor
    mill: Mill
    longest_request_tokens: int
    steps: Steps
    look_s: float

    def lives(self) -> Iterator[bool]:
        while self.mill.needs_server():
            ended = yield from self._life()
            if isinstance(ended, Finished):
                break
            verdict = self.steps.diagnose(self.servers, ended)
            yield True
            if not verdict.relaunch:
                self.mill.fail(self.servers.gave_up(verdict, ended))
                break
            yield from self._wait(verdict.wait_s)

    def _life(self) -> Generator[bool, None, Lost | Finished | LaunchFailed]:
        """Launched, let through the gate, and waited for until it is lost or nothing is left to do."""
        if failed := self._attach():
            return failed
        events.tell(events.Resuming(self.mill.done(), self.mill.pending()))
        yield True
        while True:
            ended = self.mill.wait(self.look_s)
            if isinstance(ended, Lost) and (self.mill.is_served() or not ended.last):
                self.servers.let_go(ended)
                yield True
            elif ended is not None:
                return ended
            elif self.servers.may_return():
                self._attach()
                yield True
            else:
                yield False

    def _attach(self) -> LaunchFailed | None:
        """Launch what is missing and lead it through the gate; the last failure, if nothing is served."""
        failed: LaunchFailed | None = None
        try:
            for server in self.steps.launch(self.servers):
                try:
                    facts = self.steps.gate(self.servers, server, self.longest_request_tokens)
                    self.mill.attach(server, facts)
                except LaunchFailed as error:
                    failed = _told(error)
        except LaunchFailed as error:
            failed = _told(error)
        return None if self.mill.is_served() else failed

    def _wait(self, seconds: float) -> Iterator[bool]:
        """As long as there is something to wait for; another server may be lost meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.mill.needs_server():
            late = self.mill.wait(min(left, self.look_s))
            if isinstance(late, Lost):
                self.servers.let_go(late)
            yield late is not None


def _told(failed: LaunchFailed) -> LaunchFailed:
    """At once, as the next server's gate may take minutes."""
    events.tell(events.Notice(str(failed).partition("\n")[0]))
    return failed
