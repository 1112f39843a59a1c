"""One server as the mill uses it: its client, its window, and when it counts as dead."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from promptmill.generation.client import OpenAIClient
from promptmill.serving.gate import Facts
from promptmill.serving.server import Server

_WATCH_S = 0.2
_BUSY_PAUSE_S = 1.0
_DEATH_CONFIRMED_S = 3.0
_STREAMS_END_S = 1.0


class Replica:
    """Owned by the mill's loop. `watch` runs for as long as it serves."""

    def __init__(self, server: Server, facts: Facts, max_in_flight: int, inactivity_timeout_s: float) -> None:
        self.server = server
        self.client = OpenAIClient(server.url, server.api_key, facts.served_model_name)
        self.window = min(max_in_flight, facts.slots or max_in_flight)
        self.kv_dtype = facts.kv_dtype or ""
        self.answers = 0
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests in flight."""
        self._inactivity_timeout_s = inactivity_timeout_s
        self._last_token_at = time.monotonic()
        self._paused_until = 0.0
        self._gone = asyncio.Event()

    def has_room(self) -> bool:
        return len(self.tasks) < self.window and not self.paused and not self._gone.is_set()

    @property
    def paused(self) -> bool:
        return self._paused_until > time.monotonic()

    @property
    def fill(self) -> float:
        """Share of the window that is in use."""
        return len(self.tasks) / self.window

    def add(self, task: asyncio.Task[None]) -> None:
        if not self.tasks:
            self._last_token_at = time.monotonic()  # silence counts from here, not from the last answer
        self.tasks.add(task)

    def saw_tokens(self) -> None:
        self._last_token_at = time.monotonic()

    def pause(self) -> None:
        """It refuses for now: send nothing for a moment."""
        self._paused_until = time.monotonic() + _BUSY_PAUSE_S

    async def turns_out_dead(self) -> bool:
        """Whether a connection that just broke was the server's death; waits a moment to know."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), _DEATH_CONFIRMED_S)
        return self._gone.is_set()

    async def watch(self) -> str:
        """Returns the cause of death, or nothing where `close` was called first. No request is left then."""
        cause = ""
        while not cause and not self._gone.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), _WATCH_S)
            cause = self._death_cause()
        closed = self._gone.is_set()
        self._gone.set()
        tasks = list(self.tasks)
        if tasks and not closed:  # streams of a dead server end by themselves; those of a stuck one do not
            await asyncio.wait(tasks, timeout=_STREAMS_END_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()
        return "" if closed else cause

    def close(self) -> None:
        """The run is over; requests in flight are abandoned."""
        self._gone.set()

    def _death_cause(self) -> str:
        process = self.server.process
        if process is not None and not process.alive:
            return f"the process ended with status {process.exit_status}"
        silent = time.monotonic() - self._last_token_at
        if self.tasks and silent > self._inactivity_timeout_s:
            return f"no token for {silent:.0f} s with {len(self.tasks)} requests in flight"
        return ""
