"""The mill: keeps servers busy and makes every answer durable.

It runs one asyncio loop in one thread of its own, from `start` to `close`. Other threads call:

    generate(partition)   waits until that partition needs nothing more; raises ServerDied when the last
                          server is lost, and may then be called again: it goes on from the store
    attach(server, facts) a healthy server joins
    wait(timeout_s)       the next thing that the owner must know: a server Lost, or Finished

Inside, one task dispatches, one task a server watches, one ticks, and each request is a task of a group that
`_run` owns.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import PromptmillError, PromptRejected, ServerBusy, ServerDied, ServerError, StoreError
from promptmill.generation.deadline import end_of_run
from promptmill.generation.figures import Counter, Meter
from promptmill.generation.picker import Picker
from promptmill.generation.prompts import PromptMaker, Recorder
from promptmill.generation.replica import Replica
from promptmill.generation.suspects import Suspects
from promptmill.model import Model
from promptmill.prompts.manifest import read_keys
from promptmill.serving.engines import make_client
from promptmill.serving.facts import Facts
from promptmill.serving.gate import CANARY
from promptmill.serving.liveness import NO_PROMPTS_FAULT, Loss
from promptmill.serving.server import Lost, Server
from promptmill.settings import Profile, SamplingSettings
from promptmill.store.store import SEAL_BYTES, Store, goes_on, next_pending
from promptmill.types import Answer, Completion, Manifest, Prompt, Tally

MAX_TRIES = 3
_TICK_S = 0.2
_FIGURES_S = 1.0
_SEAL_S = 300.0


class MillBroke(PromptmillError):
    """A programming error stopped the mill; what was answered is in the store."""


class RunEnded(PromptmillError):
    """The run was closed while somebody still waited for a partition."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Every partition is over, or the run was stopped or failed."""


@dataclass(slots=True)
class _Partition:
    manifest: Manifest
    maker: PromptMaker
    sampling: SamplingSettings
    length_class: str
    cap: int | None
    waiter: Future[Tally] | None = None
    in_flight: int = 0
    over: bool = False


class Mill:
    """See the module. One instance a run."""

    def __init__(
        self,
        profile: Profile,
        store: Store,
        renderer: ChatRenderer,
        model: Model,
        manifests: list[Manifest],
        retry_failed: bool = False,
    ) -> None:
        self._profile = profile
        self._store = store
        self._renderer = renderer
        self._model = model
        self._recorder = Recorder(renderer, model)
        self._retry_failed = retry_failed
        self._partitions = {m.partition: self._partition(m, renderer) for m in manifests}
        self._picker = Picker()
        self._suspects = Suspects()
        self._silent: list[Prompt] = []
        self._meter = Meter()
        self._replicas: list[Replica] = []
        self._under_way: set[str] = set()
        self._in_class: dict[str, int] = {}
        self._outcomes: queue.SimpleQueue[Lost | Finished] = queue.SimpleQueue()
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()
        self._stopping = ""
        self._drain_until = 0.0
        self._failure: PromptmillError | None = None
        self._finished = False
        self._chaos_left = profile.chaos.kill_server_after_answers
        self._answers = 0
        self._deadline = end_of_run(profile.run, datetime.now())
        self._thread = threading.Thread(target=self._main, name="mill", daemon=True)
        self._ready = threading.Event()

    # --- called by the owner's threads

    def start(self) -> None:
        """Count what is pending, and start the loop's thread."""
        for name, part in self._partitions.items():
            self._meter.counters[name] = self._count(part)
            part.over = not self._meter.counters[name].left
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """End the loop and its tasks, and seal what is in the journal. Requests in flight are abandoned."""
        if self._thread.is_alive():
            self.fail(RunEnded("the run was ended"))
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> Mill:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def needs_server(self) -> bool:
        """Whether a server would have anything to do."""
        return self.pending() > 0 and not self._stopping and self._failure is None

    def pending(self) -> int:
        """Requests that are known to be needed, over all partitions."""
        return sum(c.left for c in self._meter.counters.values())

    def is_pending(self, partition: str) -> bool:
        return self._meter.counters[partition].left > 0

    def done(self) -> int:
        return sum(c.done for c in self._meter.counters.values())

    def generate(self, partition: str) -> Tally:
        """Wait until the partition needs nothing more, or the run is stopped.

        Raises ServerDied when the last server is lost (call again), and what ended the run otherwise.
        """
        if self._failure is not None:
            raise self._failure
        waiter: Future[Tally] = Future()
        self._post(lambda: self._enter(partition, waiter))
        return waiter.result()

    def attach(self, server: Server, facts: Facts) -> None:
        """A server that passed the gate joins."""
        self._call(self._join(server, facts))

    def wait(self, timeout_s: float) -> Lost | Finished | None:
        """What happened, or None after `timeout_s`."""
        with suppress(queue.Empty):
            return self._outcomes.get(timeout=timeout_s)
        return None

    def is_served(self) -> bool:
        """Whether a server is attached that has not been lost."""
        return bool(self._replicas)

    def stop(self, why: str) -> None:
        """Send nothing more; what is in flight may finish, for at most run.drain_timeout_s."""
        self._post(lambda: self._begin_stop(why))

    def fail(self, error: PromptmillError) -> None:
        """End the run: every waiting and future `generate` raises `error`."""
        self._post(lambda: self._fail(error))

    @property
    def stopping(self) -> str:
        """Why the run is being stopped; empty while it is not."""
        return self._stopping

    @property
    def failure(self) -> PromptmillError | None:
        return self._failure

    def answers_by_server(self) -> dict[str, int]:
        """Answers that each server alive has finished."""
        return {replica.server.name: replica.answers for replica in list(self._replicas)}

    def figures(self) -> events.Figures:
        return self._meter.figures(time.monotonic())

    # --- the loop's thread

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception as error:  # noqa: BLE001  a fault of ours; nobody may wait for ever because of it
            self._fail(MillBroke("".join(traceback.format_exception(error))))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        async with asyncio.TaskGroup() as group:
            self._group = group
            owned = [group.create_task(self._dispatch()), group.create_task(self._tick())]
            await self._closing.wait()
            for task in owned:
                task.cancel()
            for replica in self._replicas:
                replica.close()
        try:
            await asyncio.to_thread(self._store.seal_all)
        except StoreError as error:
            events.tell(events.Notice(f"answers stay in the journal for now: {error}"))

    async def _dispatch(self) -> None:
        """Fill every window, then sleep until something changes."""
        while True:
            self._wake.clear()
            while (replica := self._roomiest()) and not self._stopping and not self._failure:
                try:
                    prompt = self._pick()
                except PromptmillError as error:
                    self._fail(error)
                    break
                if prompt is None:
                    break
                self._send(prompt, replica)
            await self._settle()
            await self._wake.wait()

    def _pick(self) -> Prompt | None:
        """While there are suspects, they are tried one at a time and nothing else is sent."""
        if self._suspects:
            return self._suspects.next()
        return self._picker.pick(lambda c: self._in_class.get(c, 0), self._is_duplicate)

    def _is_duplicate(self, prompt: Prompt) -> bool:
        """Under way for another row, or done since it was listed."""
        return self._is_under_way(prompt.prompt_hash) or self._store.is_done(
            prompt.prompt_hash, prompt.max_new_tokens, self._retry_failed
        )

    def _is_under_way(self, prompt_hash: str) -> bool:
        return prompt_hash in self._under_way or prompt_hash in self._suspects

    def _roomiest(self) -> Replica | None:
        return min((r for r in self._replicas if r.has_room()), key=lambda r: r.fill, default=None)

    def _send(self, prompt: Prompt, replica: Replica) -> None:
        part = self._partitions[prompt.partition]
        self._count_in_flight(part, prompt, +1)
        task = self._group.create_task(self._one(prompt, part, replica))
        replica.add(task)
        task.add_done_callback(lambda _: self._sent(prompt, part, replica, task))

    def _sent(self, prompt: Prompt, part: _Partition, replica: Replica, task: asyncio.Task[None]) -> None:
        replica.remove(task)
        self._count_in_flight(part, prompt, -1)
        self._wake.set()

    def _count_in_flight(self, part: _Partition, prompt: Prompt, by: int) -> None:
        part.in_flight += by
        self._meter.counters[prompt.partition].in_flight += by
        self._in_class[part.length_class] = self._in_class.get(part.length_class, 0) + by
        if by > 0:
            self._under_way.add(prompt.prompt_hash)
        else:
            self._under_way.discard(prompt.prompt_hash)

    async def _one(self, prompt: Prompt, part: _Partition, replica: Replica) -> None:
        """One request, from sending it to a durable record or back to the picker."""

        if prompt.error:
            await self._give_up(prompt, part, prompt.error, replica)
            return

        tokens, sent_at = 0, time.monotonic()

        def on_tokens(n: int) -> None:
            nonlocal tokens
            if not tokens and prompt.prompt_hash in self._suspects:
                self._suspects.cleared(prompt.prompt_hash)
                self._wake.set()  # the next one's turn
            tokens += n
            replica.saw_tokens(n)
            self._meter.counters[prompt.partition].tokens += n

        try:
            completion = await replica.client.complete(
                prompt.input_ids,
                part.sampling,
                prompt.max_new_tokens,
                prompt.sample,
                on_tokens,
                prompt.prompt_hash,
            )
        except asyncio.CancelledError:
            self._interrupted(prompt, tokens)  # its stream was stuck; another server may have it
            raise
        except PromptRejected as error:
            await self._give_up(prompt, part, str(error), replica)
        except ServerBusy:
            self._put_off(prompt, replica)
        except ServerError as error:
            if await replica.turns_out_dead():
                self._interrupted(prompt, tokens)
            elif await replica.answers_others(sent_at):
                await self._failed_try(prompt, part, replica, error)
            else:
                self._put_off(prompt, replica)
        except PromptmillError as error:
            self._fail(error)
        else:
            await self._answered(prompt, part, replica, completion)

    def _interrupted(self, prompt: Prompt, tokens: int) -> None:
        """By the loss of its server, which is not its fault if it had shown a token."""
        if tokens:
            self._picker.put_ahead(prompt)
        else:
            self._silent.append(prompt)

    async def _answered(
        self, prompt: Prompt, part: _Partition, replica: Replica, completion: Completion
    ) -> None:
        server = replica.server.name
        answer = self._recorder.answered(prompt, completion, server, replica.kv_dtype)
        if not await self._record(prompt, part, answer):
            return
        replica.answers += 1
        self._maybe_chaos(replica)
        if following := part.maker.following(prompt, answer):
            self._picker.put_ahead(following, again=False)

    async def _give_up(self, prompt: Prompt, part: _Partition, why: str, replica: Replica) -> None:
        await self._record(prompt, part, self._recorder.failed(prompt, why, replica.server.name))

    def _put_off(self, prompt: Prompt, replica: Replica) -> None:
        """The server takes nothing for now, and says nothing of this prompt by that."""
        replica.pause()
        if prompt.prompt_hash in self._suspects:
            self._suspects.postponed(prompt.prompt_hash)
        else:
            self._picker.put_ahead(prompt)

    async def _failed_try(
        self, prompt: Prompt, part: _Partition, replica: Replica, error: ServerError
    ) -> None:
        """What is not the server's death counts against the prompt, up to MAX_TRIES."""
        self._suspects.cleared(prompt.prompt_hash)
        again = prompt.after_failed_try()
        if again.tries >= MAX_TRIES:
            await self._give_up(prompt, part, str(error), replica)
        else:
            self._picker.put_ahead(again)

    async def _record(self, prompt: Prompt, part: _Partition, answer: Answer) -> bool:
        """Make a record durable; a record that cannot be is the end of the run."""
        try:
            await asyncio.wrap_future(self._store.put(answer))
        except StoreError as error:
            self._fail(error)
            return False
        self._suspects.cleared(prompt.prompt_hash)
        self._answers += 1
        turns_left = 0 if goes_on(answer.status) else len(prompt.row.turns) - prompt.turn - 1
        self._meter.answered(answer.partition, turns_left)
        return True

    def _maybe_chaos(self, replica: Replica) -> None:
        if self._chaos_left and self._answers >= self._chaos_left and replica.server.process:
            self._chaos_left = 0
            events.tell(events.Notice("[chaos] killing the server now (SIGKILL), as the profile asks"))
            replica.server.process.kill()

    # --- servers

    async def _join(self, server: Server, facts: Facts) -> None:
        name = facts.served_model_name
        client = make_client(self._profile, server, name, self._model, self._renderer)
        canary = self._renderer.render(CANARY, None)
        replica = Replica(server, client, facts, self._profile.server, canary)
        self._replicas.append(replica)
        self._group.create_task(self._watch(replica))
        self._wake.set()

    async def _watch(self, replica: Replica) -> None:
        loss = await replica.watch()
        self._replicas.remove(replica)
        if loss:
            await self._lose(replica, loss)

    async def _lose(self, replica: Replica, loss: Loss) -> None:
        events.tell(events.Died(replica.server.name, loss.text))
        silent, self._silent = self._silent, []
        guilty = None
        if loss.signature in NO_PROMPTS_FAULT:
            self._suspects.interrupted()
            for prompt in silent:
                self._picker.put_ahead(prompt)
        else:
            guilty = self._suspects.died(silent)
        if guilty is not None:
            why = f"quarantined: alone without a token when the server died again ({loss.text})"
            await self._give_up(guilty, self._partitions[guilty.partition], why, replica)
            events.tell(events.Quarantined(guilty.row.id, guilty.prompt_hash, guilty.partition))
        self._wake.set()
        if not self._replicas:
            for name, part in self._partitions.items():
                self._picker.remove(name)
                if part.waiter and not part.over:
                    part.waiter.set_exception(ServerDied(f"{replica.server.name}: {loss.text}"))
                    part.waiter = None
        lost = Lost(
            replica.server,
            loss,
            replica.answers,
            replica.lost_in_flight,
            last=not self._replicas,
            quarantined=(guilty.prompt_hash,) if guilty else (),
        )
        self._outcomes.put(lost)

    # --- partitions

    def _partition(self, manifest: Manifest, renderer: ChatRenderer) -> _Partition:
        settings = self._profile.partition(manifest.partition)
        return _Partition(
            manifest=manifest,
            maker=PromptMaker(self._store, manifest, renderer, self._retry_failed),
            sampling=self._profile.sampling_for(settings),
            length_class=settings.length_class,
            cap=self._profile.classes[settings.length_class].max_in_flight,
        )

    def _count(self, part: _Partition) -> Counter:
        """Requests that are done and, each conversation going on to its end, will be."""
        cap, done, total = part.manifest.max_new_tokens, 0, 0
        for samples in read_keys(part.manifest):
            for hashes in samples:
                turn = next_pending(self._store, hashes, cap, self._retry_failed)
                finished = len(hashes) if turn is None else turn
                done += finished
                total += len(hashes)
        return Counter(total, done)

    def _enter(self, partition: str, waiter: Future[Tally]) -> None:
        part = self._partitions[partition]
        if self._failure is not None:
            waiter.set_exception(self._failure)
            return
        part.waiter, part.over = waiter, False
        self._scan(part)
        self._wake.set()

    def _scan(self, part: _Partition) -> None:
        """List what is pending, from the start; the store knows what was done meanwhile."""
        name = part.manifest.partition
        fresh = self._count(part)
        counter = self._meter.counters[name]
        counter.total, counter.done = fresh.total, fresh.done
        self._picker.add(
            name,
            part.maker.pending(),
            fresh.total - fresh.done,
            part.length_class,
            part.cap,
            self._profile.partition(name).weight,
        )

    async def _settle(self) -> None:
        """Finish the partitions that have nothing left to send and nothing in flight."""
        for name, part in self._partitions.items():
            if part.waiter is None or part.in_flight or self._is_awaited(name):
                continue
            if not self._stopping and self._meter.counters[name].left:
                if not self._picker.exhausted(name):
                    continue
                if skipped := self._picker.skipped(name):
                    # Duplicates of requests that others make: once those are answered, look again.
                    if not any(map(self._is_under_way, skipped)):
                        self._scan(part)
                        self._wake.set()
                    continue
            await self._finish(name, part)
        if not self._finished and all(p.over for p in self._partitions.values()):
            self._finished = True
            self._outcomes.put(Finished())

    def _is_awaited(self, name: str) -> bool:
        """A prompt of it is between two servers: out of flight, and not with the picker either."""
        between = [*self._silent, *self._suspects]
        return not self._stopping and any(prompt.partition == name for prompt in between)

    async def _finish(self, name: str, part: _Partition) -> None:
        waiter, part.waiter, part.over = part.waiter, None, True
        self._picker.remove(name)
        try:
            await asyncio.to_thread(self._store.seal, name)
        except StoreError as error:
            events.tell(events.Notice(f"{name}: its answers stay in the journal for now: {error}"))
        except asyncio.CancelledError:
            if waiter is not None:
                waiter.set_exception(RunEnded("the run was ended"))
            raise
        tally = self._store.tally(part.manifest)
        if waiter is not None:
            waiter.set_result(tally)

    def _begin_stop(self, why: str) -> None:
        if not self._stopping:
            self._stopping = why
            self._drain_until = time.monotonic() + self._profile.run.drain_timeout_s
            events.tell(events.Notice(f"stopping: {why}; requests in flight may finish"))
            self._wake.set()

    def _fail(self, error: PromptmillError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        for name, part in self._partitions.items():
            self._picker.remove(name)
            part.over = True
            if part.waiter is not None:
                part.waiter.set_exception(error)
                part.waiter = None
        self._outcomes.put(Finished())

    # --- time

    async def _tick(self) -> None:
        """What happens by the clock: stop requests, the deadline, figures, sealing."""
        told = sealed = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if self._store.stop_file.exists():
                self._begin_stop("promptmill stop was called")
            if self._deadline is not None and datetime.now() >= self._deadline:
                self._begin_stop("the time for this run is over")
            if self._stopping and now > self._drain_until:
                for replica in self._replicas:
                    for task in replica.tasks:
                        task.cancel()
            self._wake.set()  # a pause may be over
            if now - told >= _FIGURES_S and self._replicas:
                told = now
                events.tell(self._meter.figures(now))
            if now - sealed >= _SEAL_S:
                sealed = now
                await self._seal_some()

    async def _seal_some(self) -> None:
        for name in self._partitions:
            try:
                await asyncio.to_thread(self._store.seal, name, SEAL_BYTES // 64)
            except StoreError as error:
                events.tell(events.Notice(f"{name}: its answers stay in the journal for now: {error}"))

    def _post(self, action: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(action)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()
