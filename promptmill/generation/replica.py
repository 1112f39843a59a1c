"""One server as the mill uses it: its client, its window, and when it counts as lost."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from promptmill.errors import ServerError
from promptmill.events import Serving
from promptmill.generation.breaks import Breaks
from promptmill.generation.checkup import CheckUp
from promptmill.generation.window import START, RequestSizes, Window
from promptmill.serving.client import Client, ConnectionRefused, Load, Request
from promptmill.serving.facts import Facts
from promptmill.serving.liveness import Limits, Liveness, Loss
from promptmill.serving.server import Server
from promptmill.settings import ServerSettings

CANARY_S = 60.0
_WATCH_S = 0.2
_BUSY_PAUSE_S = 1.0
_DEATH_CONFIRMED_S = 3.0
_STREAMS_END_S = 1.0
_SAMPLE_S = 5.0


class Replica:
    """Owned by the mill's loop. `watch` runs for as long as it serves."""

    def __init__(
        self,
        server: Server,
        client: Client,
        facts: Facts,
        settings: ServerSettings,
        canary: Request,
        sizes: RequestSizes,
        checkup: CheckUp,
    ) -> None:
        self.server = server
        self.client = client
        self._canary = canary
        self._asks_canary = asyncio.Lock()
        self._token_at = self._sick_at = 0.0
        limit = min((n for n in (settings.max_in_flight, facts.slots) if n), default=None)
        self._fixed = (limit or START) if settings.engine != "sglang" else 0
        """The window of a server that does not tell its load."""
        self._window = Window(facts.capacity_tokens, limit, sizes, time.monotonic())
        self.kv_dtype = facts.kv_dtype or ""
        self.gpus = facts.gpus or 0
        self._capacity_tokens = facts.capacity_tokens
        self._load: Load | None = None
        self.answers = 0
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests in flight."""
        self.lost_in_flight = 0
        """How many there were when it was lost."""
        self.breaks = Breaks()
        self.checkup = checkup
        self._poll_s = settings.poll_interval_s
        limits = Limits(settings.inactivity_timeout_s, settings.collapse_timeout_s)
        self._liveness = Liveness(limits, time.monotonic())
        self._paused_until = 0.0
        self._answered_at = 0.0
        """When it last gave a sign of life: a token, or an answer to a poll."""
        self._next_sample_at = 0.0
        self._gone = asyncio.Event()
        self._poll_soon = asyncio.Event()

    def has_room(self) -> bool:
        return len(self.tasks) < self.window and self.is_open

    @property
    def window(self) -> int:
        """Requests that it may have in flight now."""
        return self._fixed or self._window.size(time.monotonic())

    @property
    def is_open(self) -> bool:
        """Whether it takes requests at all, for now."""
        held_up = self.paused or self.checkup.holds_up
        return not held_up and not self._gone.is_set() and not self._liveness.refusing

    @property
    def paused(self) -> bool:
        return self._paused_until > time.monotonic()

    @property
    def fill(self) -> float:
        """Share of the window that is in use."""
        return len(self.tasks) / self.window

    def figures(self) -> Serving:
        load, capacity = self._load or Load(), self._capacity_tokens
        kv_use = load.used_tokens / capacity if load.used_tokens is not None and capacity else None
        return Serving(self.server.name, len(self.tasks), self.window, load.queued, kv_use)

    def add(self, task: asyncio.Task[None]) -> None:
        self._liveness.sent(time.monotonic())
        self.tasks.add(task)

    def remove(self, task: asyncio.Task[None]) -> None:
        self._liveness.ended()
        self.tasks.discard(task)

    def saw_tokens(self, n: int) -> None:
        self._answered_at = self._token_at = time.monotonic()
        self._liveness.tokens(n, self._answered_at)

    def pause(self, seconds: float = 0.0) -> None:
        """It refuses for now: send nothing for a moment, or for as long as it asks for."""
        now = time.monotonic()
        self._paused_until = max(self._paused_until, now + max(seconds, _BUSY_PAUSE_S))
        self._liveness.put_off(now)

    async def answers_others(self, since: float) -> bool:
        """Whether it has shown a token since then, or does when a harmless prompt is asked.

        Where it does not, a failure is the server's and no prompt is to pay for it.
        """
        async with self._asks_canary:
            if self._token_at < since and self._sick_at < since:
                try:
                    async with asyncio.timeout(CANARY_S):
                        await self.client.complete(self._canary)
                    self.saw_tokens(1)
                except (ServerError, TimeoutError):
                    self._sick_at = time.monotonic()
            return self._token_at >= max(since, self._sick_at)

    async def turns_out_dead(self) -> bool:
        """Whether a connection that just broke was the server's death; waits until that is known.

        It is not while the server gives no sign of life: a prompt must not pay for a server that is away.
        """
        broke_at = time.monotonic()
        self._poll_soon.set()
        while not self._gone.is_set():
            if self._answered_at > broke_at and time.monotonic() - broke_at >= _DEATH_CONFIRMED_S:
                return False
            await _wait_for(self._gone, _WATCH_S)
        return True

    async def watch(self) -> Loss | None:
        """Returns why it was lost, or None where `close` was called first. No request is left then."""
        poll, checkups = asyncio.create_task(self._poll()), asyncio.create_task(self.checkup.run())
        loss = None
        while loss is None and not self._gone.is_set():
            await _wait_for(self._gone, _WATCH_S)
            loss = self._loss()
            if checkups.done():
                checkups.result()  # a fault of ours in there must not keep this server out for ever
        closed = self._gone.is_set()
        self._gone.set()
        poll.cancel()
        checkups.cancel()
        tasks = list(self.tasks)
        self.lost_in_flight = len(tasks)
        if tasks and not closed:  # streams of a dead server end by themselves; those of a stuck one do not
            await asyncio.wait(tasks, timeout=_STREAMS_END_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(poll, checkups, *tasks, return_exceptions=True)
        await self.client.close()
        return None if closed else loss

    def close(self) -> None:
        """The run is over; requests in flight are abandoned."""
        self._gone.set()

    async def _poll(self) -> None:
        """Ask for its load, for as long as it serves."""
        while True:
            await _wait_for(self._poll_soon, self._poll_s)
            self._poll_soon.clear()
            try:
                load = await self.client.load()
            except ConnectionRefused:
                self._liveness.refused(time.monotonic())
            except ServerError:
                continue  # too busy to answer, or cut off: neither life nor death
            else:
                self._answered_at = time.monotonic()
                self._load = load
                self._sample(load)
                self._liveness.polled(load, self._answered_at)

    def _sample(self, load: Load | None) -> None:
        if load is not None and load.running is not None and time.monotonic() >= self._next_sample_at:
            self._next_sample_at = time.monotonic() + _SAMPLE_S
            self._window.sample(self._answered_at, load.running, load.queued or 0, len(self.tasks))

    def _loss(self) -> Loss | None:
        if self.checkup.sick:
            return Loss("sick", self.checkup.sick)
        process = self.server.process
        if process is not None and not process.alive:
            return Loss("", f"the process ended with status {process.exit_status}")
        if self.server.scheduler_lost():
            return Loss("zombie", "its scheduler process is gone, though the port may still answer")
        return self._liveness.loss(time.monotonic())


async def _wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Not asyncio.wait_for: in Python 3.11 it drops a cancellation that comes together with the event."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
