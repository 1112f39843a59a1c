"""The HTTP process's half of a request: ids out to the scheduler, tokens back, and who waits for them."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson

from promptmill.sim.faults import HTTP, Fault, Triggers
from promptmill.sim.logs import Log
from promptmill.sim.refusals import Refusal, value_error
from promptmill.sim.text import Detokenizer, ModelFiles

_TICK_S = 0.02


@dataclass(slots=True)
class State:
    """One request from its arrival to its last chunk."""

    rid: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    stream: bool
    detokenizer: Detokenizer
    logprobs: tuple[int, int] | None = None
    """logprob_start_len and top_logprobs_num, where they were asked for."""
    received: float = field(default_factory=time.time)
    dispatched: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    cached_tokens: int = 0
    retractions: int = 0
    reasoning_tokens: int = 0
    scheduled: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """When the scheduler received, admitted and prefilled it."""
    first_at: float = 0.0
    finished_at: float = 0.0
    chunks: asyncio.Queue[tuple[int, dict[str, Any] | None]] = field(default_factory=asyncio.Queue)
    """Output tokens so far and the finish reason, one entry a message of the scheduler."""


class Hub:
    """Requests that live in this server; everything runs in one event loop."""

    def __init__(
        self,
        args: dict[str, Any],
        sim: Any,
        ready: dict[str, Any],
        files: ModelFiles,
        faults: list[Fault],
        log: Log,
    ) -> None:
        self.args, self.sim, self.ready, self.files, self.log = args, sim, ready, files, log
        self.states: dict[str, State] = {}
        self.last_receive = time.time()
        self.load: dict[str, Any] = {}
        self.counts = {"requests": 0, "aborted": 0, "prompt": 0, "generated": 0, "cached": 0}
        self.status = "Starting"
        self.exiting = False
        self.lost = False
        self.busy_until = self.full_until = 0.0
        self.broken_answers = 0
        self.cut = asyncio.Event()
        self._triggers = Triggers(faults, HTTP)
        self._origin = time.monotonic()
        self._answers = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._serial = itertools.count()
        self._writer: asyncio.StreamWriter | None = None

    @property
    def speed(self) -> float:
        return float(self.sim.sim_speed)

    async def connect(self, sock: socket.socket) -> list[asyncio.Task[None]]:
        """Start to talk with the scheduler; the caller owns the tasks."""
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=1 << 26)
        return [asyncio.create_task(self._read(reader)), asyncio.create_task(self._tick())]

    def submit(self, state: State, crash: bool = False) -> None:
        """Hand a request to the scheduler. Raises Refusal for a duplicate rid and where a fault says so."""
        if self.broken_answers > 0 and not state.stream:
            self.broken_answers -= 1
            raise Refusal(500, {})
        if state.rid in self.states:
            raise value_error(f"Duplicate request ID detected: {state.rid}")
        self.states[state.rid] = state
        self.counts["requests"] += 1
        self.counts["prompt"] += len(state.prompt_ids)
        state.dispatched = time.time()
        if time.monotonic() < self.full_until:
            finish = {
                "type": "abort",
                "message": "The request queue is full.",
                "status_code": 503,
                "err_type": None,
            }
            self._take(state.rid, [], finish, 0, 0, 0, 0.0, 0.0, 0.0)
        if self.lost or state.finish:
            return
        interval = state.sampling["stream_interval"]
        interval = self.args["stream_interval"] if interval is None else interval
        keys = [
            "max_new_tokens",
            "min_new_tokens",
            "temperature",
            "ignore_eos",
            "stop_token_ids",
            "stop",
            "stop_regex",
            "sampling_seed",
        ]
        self.send({
            "t": "generate", "rid": state.rid, "ids": state.prompt_ids, "crash": crash,
            "stream": state.stream,
            "interval": max(1, interval), "sampling": {key: state.sampling[key] for key in keys},
        })  # fmt: skip

    async def updates(self, state: State) -> AsyncGenerator[tuple[int, dict[str, Any] | None], None]:
        """Chunks of a submitted request, the last with its finish reason; abort it if the caller leaves."""
        try:
            while True:
                count, finish = await state.chunks.get()
                yield count, finish
                if finish is not None:
                    return
        finally:
            if self.states.get(state.rid) is state:
                del self.states[state.rid]
                if state.finish is None:
                    kind = 3 if state.stream else 1
                    self.log.error(
                        f"[http_server] Error: Request is disconnected from the client side (type {kind}). "
                        f"Abort request obj.rid={state.rid!r}"
                    )
                    self.send({"t": "abort", "rid": state.rid, "all": False})

    async def finished(self, state: State) -> None:
        """Wait for the end of a submitted request; it is aborted if the caller leaves."""
        async with aclosing(self.updates(state)) as updates:
            async for _ in updates:
                pass

    def abort(self, rid: str = "", everything: bool = False) -> None:
        """As /abort_request: of a rid that is known, with all that start with it; of another one nothing."""
        if everything or rid in self.states:
            self.send({"t": "abort", "rid": rid, "all": everything})

    async def ask(self, kind: str) -> dict[str, Any]:
        """A question that the scheduler itself answers; waits for as long as it is stuck."""
        number = next(self._serial)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self.send({"t": kind, "id": number})
        return await future

    def send(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(orjson.dumps(message) + b"\n")

    async def is_healthy(self) -> bool:
        """What /health finds out: whether any output came after it asked. Takes a second at least."""
        started = time.time()
        self.send({"t": "health", "rid": f"HEALTH_CHECK_{uuid.uuid4().hex}"})
        while time.time() < started + 20 / self.speed:
            await asyncio.sleep(1 / self.speed)
            if self.last_receive > started and time.monotonic() >= self.busy_until:
                self.status = "Up"
                return True
        self.log.error(
            "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. "
            f"tic start time: {time.strftime('%H:%M:%S', time.localtime(started))}. "
            f"last_heartbeat time: {time.strftime('%H:%M:%S', time.localtime(self.last_receive))}"
        )
        self.status = "UnHealthy"
        return False

    # -- what comes back --

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = orjson.loads(line)
            if "l" in message:
                self.load = message["l"]
            if message["t"] == "out":
                self.last_receive = time.time()
                for output in message["o"]:
                    self._take(*output)
            elif message["t"] == "reply":
                future = self._replies.pop(message["id"], None)
                if future is not None and not future.done():
                    future.set_result(message)

    def _take(
        self, rid: str, ids: list[int], finish: dict[str, Any] | None, cached: int, retractions: int,
        reasoning: int, received: float, admitted: float, prefilled: float,
    ) -> None:  # fmt: skip
        state = self.states.get(rid)
        if state is None or self.lost:  # the probe, or a client that has left
            return
        state.output_ids += ids
        state.finish, state.cached_tokens, state.retractions = finish, cached, retractions
        state.reasoning_tokens = reasoning if self.args["reasoning_parser"] else 0
        state.scheduled = (received, admitted, prefilled)
        if ids and not state.first_at:
            state.first_at = time.time()
            self.counts["cached"] += cached
        self.counts["generated"] += len(ids)
        if finish is not None:
            state.finished_at = time.time()
            self.counts["aborted"] += finish["type"] == "abort"
            self._answers += not rid.startswith("WARM_UP")
            del self.states[rid]
        state.chunks.put_nowait((len(state.output_ids), finish))

    # -- faults --

    async def _tick(self) -> None:
        self._origin = time.monotonic()
        while True:
            elapsed = (time.monotonic() - self._origin) * self.speed
            for fault in self._triggers.due(self._answers, len(self.states), elapsed):
                self.act(fault)
            await asyncio.sleep(_TICK_S)

    def poisoned(self, ids: list[int]) -> None:
        for fault in self._triggers.poisoned(ids):
            self.act(fault)

    def act(self, fault: Fault) -> None:
        until = time.monotonic() + fault.seconds(60) / self.speed
        if fault.name == "lost":
            self.lost = True
            self.abort(everything=True)
        elif fault.name == "busy":
            self.busy_until = until
        elif fault.name == "full":
            self.full_until = until
        elif fault.name == "cut":
            self.cut.set()
        elif fault.name == "http500":
            self.broken_answers = int(fault.seconds(1))
