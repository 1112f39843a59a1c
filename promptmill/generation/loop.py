"""The mill's loop: fills every window, watches every server, and sees each partition to its end.

Everything here runs in one asyncio loop, in the mill's thread; what other threads may call says so. One task
dispatches, one task a server watches, one ticks, and each request is a task of a group that `run` owns.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import PromptmillError, ServerDied, ServerError, StoreError
from promptmill.generation.asking import Asking
from promptmill.generation.checkup import CheckUp
from promptmill.generation.deadline import end_of_run
from promptmill.generation.figures import Meter
from promptmill.generation.forecast import Lengths
from promptmill.generation.partition import Partition, count, make_partition
from promptmill.generation.picker import Picker
from promptmill.generation.prompts import Recorder
from promptmill.generation.replica import Replica
from promptmill.generation.suspects import Suspects
from promptmill.generation.window import RequestSizes
from promptmill.model import Model
from promptmill.serving.engines import make_client
from promptmill.serving.facts import Facts
from promptmill.serving.gate import CANARY_TOKENS, canary, text_of
from promptmill.serving.liveness import NO_PROMPTS_FAULT, Loss
from promptmill.serving.server import Lost, Server
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import Manifest, Prompt, Tally

MEANS = "mean_outputs"
"""Remembered from run to run: output tokens of an answer, by partition."""
_TICK_S = 0.2
_FIGURES_S = 1.0
_SEAL_S = 300.0
_SEAL_BYTES = 1_000_000
_DEADLINE_SLACK = 0.15
"""How far the forecast may be off."""
_FLUSH_S = 3.0
HOPELESS = 50
"""Prompts of a partition that fail, with none that does not, before nothing more of it is asked."""


class RunEnded(PromptmillError):
    """The run was closed while somebody still waited for a partition."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Every partition is over, or the run was stopped or failed."""


class Loop:
    """See the module. `count` comes before `run`."""

    def __init__(
        self,
        profile: Profile,
        store: Store,
        renderer: ChatRenderer,
        model: Model,
        manifests: list[Manifest],
        retry_failed: bool,
    ) -> None:
        self.asyncio_loop: asyncio.AbstractEventLoop
        """Once `ready` is set."""
        self.ready = threading.Event()
        self.outcomes: SimpleQueue[Lost | Finished] = SimpleQueue()
        """For the owner of the run, in its own thread."""
        self.meter = Meter()
        self.figures = self.meter.figures(time.monotonic())
        """As of the last tick."""
        self.replicas: list[Replica] = []
        self.stopping = ""
        """Why the run is being stopped; empty while it is not."""
        self.failure: PromptmillError | None = None
        self._profile = profile
        self._store = store
        self._renderer = renderer
        self._model = model
        self._retry_failed = retry_failed
        self._partitions = {
            m.partition: make_partition(profile, store, m, renderer, retry_failed) for m in manifests
        }
        store.held = self._held
        self._picker = Picker(store.recall(MEANS))
        self._sizes = RequestSizes()
        self._suspects = Suspects()
        self._wake = asyncio.Event()
        self._asking = Asking(
            store,
            Recorder(renderer, model),
            self._picker,
            self._sizes,
            self._suspects,
            self.meter,
            self._wake.set,
            self.fail,
            self._go_on,
            self.replicas,
        )
        self._references: dict[str, str] = {}
        """What servers answered at the gate first; by address, those of somebody else."""
        self._under_way: set[str] = set()
        self._in_class: dict[str, int] = {}
        self._closing = asyncio.Event()
        self._drain_until = 0.0
        self._finished = False
        self._chaos_left = profile.chaos.kill_server_after_answers
        self._warned = False
        self._deadline = end_of_run(profile.run, datetime.now())

    def count(self) -> None:
        """What is done and what is not, by partition."""
        for name, part in self._partitions.items():
            manifest = part.manifest
            mean = manifest.prompt_tokens / max(1, manifest.prompts)
            self.meter.forecast.lengths[name] = Lengths(manifest.max_new_tokens, mean)
            self.meter.counters[name] = count(self._store, manifest, self._retry_failed)
            part.over = not self.meter.counters[name].left
        self.figures = self._figures()

    def pending(self) -> int:
        """Requests that are known to be needed. Called from any thread."""
        return sum(self.meter.counters[name].left for name, p in self._partitions.items() if not p.over)

    def _figures(self) -> events.Figures:
        replicas = list(self.replicas)
        gpus = sum(replica.gpus for replica in replicas)
        return self.meter.figures(time.monotonic(), [replica.figures() for replica in replicas], gpus)

    def close(self) -> None:
        self._closing.set()

    async def run(self) -> None:
        self.asyncio_loop = asyncio.get_running_loop()
        self.ready.set()
        async with asyncio.TaskGroup() as group:
            self._group = group
            owned = [group.create_task(self._dispatch()), group.create_task(self._tick())]
            await self._closing.wait()
            for task in owned:
                task.cancel()
            for replica in self.replicas:
                replica.close()
        with suppress(StoreError):  # a small loss
            await asyncio.to_thread(self._store.remember, MEANS, self._picker.mean_outputs())
        try:
            await asyncio.to_thread(self._store.seal_all)
        except StoreError as error:
            events.tell(events.Notice(f"answers stay in the journal for now: {error}"))

    async def _dispatch(self) -> None:
        """Fill every window, then sleep until something changes."""
        while True:
            self._wake.clear()
            while (replica := self._roomiest()) and not self.stopping and not self.failure:
                try:
                    prompt = self._pick()
                except PromptmillError as error:
                    self.fail(error)
                    break
                if prompt is None:
                    break
                self._send(prompt, replica)
            self._settle()
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
        return min((r for r in self.replicas if r.has_room()), key=lambda r: r.fill, default=None)

    def _send(self, prompt: Prompt, replica: Replica) -> None:
        part = self._partitions[prompt.partition]
        self._count_in_flight(part, prompt, +1)
        task = self._group.create_task(self._ask(prompt, part, replica))
        replica.add(task)
        task.add_done_callback(lambda task: self._never_began(prompt, part, replica, task))

    async def _ask(self, prompt: Prompt, part: Partition, replica: Replica) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            await self._asking.one(prompt, part, replica)
        finally:  # in one step with putting it back, or it would be skipped as one that is under way
            self._sent(prompt, part, replica, task)

    def _sent(self, prompt: Prompt, part: Partition, replica: Replica, task: asyncio.Task[None]) -> None:
        replica.remove(task)
        self._count_in_flight(part, prompt, -1)
        self._maybe_give_up(part)
        self._maybe_chaos(replica)
        self._wake.set()

    def _never_began(
        self, prompt: Prompt, part: Partition, replica: Replica, task: asyncio.Task[None]
    ) -> None:
        """A task that was cancelled before its first step has not put its prompt back."""
        if task in replica.tasks:
            self._picker.put_ahead(prompt)
            self._sent(prompt, part, replica, task)

    def _go_on(self, prompt: Prompt, replica: Replica) -> None:
        """A next turn goes out at once, to the server that has its conversation in the cache."""
        free = replica.is_open and not self._suspects and not self.stopping and not self.failure
        if free and not self._is_duplicate(prompt):
            self._picker.sent(prompt.partition)
            self._send(prompt, replica)  # in the slot that the turn before is about to leave
        else:
            self._picker.put_ahead(prompt, again=False)

    def _count_in_flight(self, part: Partition, prompt: Prompt, by: int) -> None:
        part.in_flight += by
        self.meter.counters[prompt.partition].in_flight += by
        self._in_class[part.length_class] = self._in_class.get(part.length_class, 0) + by
        if by > 0:
            self._under_way.add(prompt.prompt_hash)
        else:
            self._under_way.discard(prompt.prompt_hash)

    def _maybe_give_up(self, part: Partition) -> None:
        """Where all that was tried failed, the rest is not thrown after it; other partitions go on."""
        name = part.manifest.partition
        counter = self.meter.counters[name]
        if part.over or counter.failed < HOPELESS or counter.failed < counter.ended:
            return
        part.over = True
        self._picker.remove(name)
        part.release(
            ServerError(
                f"{name}: its first {counter.failed} prompts all failed, the last one with: "
                f"{self._asking.last_failure}. Nothing more of it is asked. "
                "Mend the cause, then run again with --retry-failed."
            )
        )

    def _maybe_chaos(self, replica: Replica) -> None:
        if self._chaos_left and self._asking.answers >= self._chaos_left and replica.server.process:
            self._chaos_left = 0
            events.tell(events.Notice("[chaos] killing the server now (SIGKILL), as the profile asks"))
            replica.server.process.kill()

    # --- servers

    async def join(self, server: Server, facts: Facts) -> None:
        name = facts.served_model_name
        client = make_client(self._profile, server, name, self._model, self._renderer)
        settings, renderer = self._profile.server, self._renderer
        question = canary(renderer, CANARY_TOKENS, self._profile.sampling.ebnf)

        async def ask() -> str:
            return text_of(await client.complete(question), renderer)

        # Of its first life in this run: one that comes back as sick as it went must not be its own measure.
        reference = self._references.setdefault("" if server.process else server.name, facts.canary)
        checkup = CheckUp(server.name, ask, reference, settings.canary_interval_s)
        harmless = canary(renderer, max_new_tokens=1)
        replica = Replica(server, client, facts, settings, harmless, self._sizes, checkup)
        self.replicas.append(replica)
        self._group.create_task(self._watch(replica))
        self._wake.set()

    async def _watch(self, replica: Replica) -> None:
        loss = await replica.watch()
        await self._asking.flushed()  # whoever lists what is pending finds the tokens that were received
        doubtful = replica.checkup.unconfirmed if loss and loss.signature == "sick" else {}
        await self._withdraw(doubtful)  # ahead of leaving: until then they are held, and no partition is over
        self.replicas.remove(replica)
        if loss:
            await self._lose(replica, loss, doubtful)

    async def _lose(self, replica: Replica, loss: Loss, withdrawn: Mapping[str, str]) -> None:
        events.tell(events.Died(replica.server.name, loss.text))
        silent, self._asking.silent = self._asking.silent, []
        guilty = None
        if loss.signature in NO_PROMPTS_FAULT:
            self._suspects.interrupted(silent)
            listed = set(withdrawn.values())  # anew: what was asked behind a withdrawn answer is void
            for prompt in silent:
                if prompt.prompt_hash not in self._suspects and prompt.partition not in listed:
                    self._picker.put_ahead(prompt)
        else:
            guilty = self._suspects.died(silent)
        if guilty is not None and guilty.partial:
            self._asking.start_over(guilty)
            await self._asking.flushed()
        elif guilty is not None:
            why = f"quarantined: alone without a token when the server died again ({loss.text})"
            await self._asking.give_up(guilty, why, replica)
            events.tell(events.Quarantined(guilty.row.id, guilty.prompt_hash, guilty.partition))
        self._wake.set()
        if not self.replicas:
            self.meter.forecast.pause()
            for name, part in self._partitions.items():
                self._picker.remove(name)
                if not part.over:
                    part.release(ServerDied(f"{replica.server.name}: {loss.text}"))
        lost = Lost(
            replica.server,
            loss,
            max(0, replica.answers - len(withdrawn)),
            replica.lost_in_flight,
            last=not self.replicas,
            quarantined=(guilty.prompt_hash,) if guilty else (),
        )
        self.outcomes.put(lost)

    async def _withdraw(self, doubtful: Mapping[str, str]) -> None:
        """Answers of a sick server, with their partitions: they are asked again."""
        if not doubtful:
            return
        try:
            await asyncio.wrap_future(self._store.withdraw(list(doubtful)))
        except StoreError as error:
            self.fail(error)
            return
        events.tell(events.Notice(f"{len(doubtful)} answers since its last good check-up are asked again"))
        for name in set(doubtful.values()):
            if self._partitions[name].waiter is not None:
                self._scan(self._partitions[name])

    def _held(self) -> set[str]:
        """Answers that may yet turn out to be a sick server's. Called from any thread."""
        held = self._under_way.copy()  # first: an answer that is durable goes from here to the unconfirmed
        return held.union(*(list(replica.checkup.unconfirmed) for replica in list(self.replicas)))

    # --- partitions

    def enter(self, partition: str, waiter: Future[Tally]) -> None:
        part = self._partitions[partition]
        if self.failure is not None:
            waiter.set_exception(self.failure)
            return
        part.waiter, part.over = waiter, False
        self._scan(part)
        self._wake.set()

    def _scan(self, part: Partition) -> None:
        """List what is pending, from the start; the store knows what was done meanwhile."""
        name = part.manifest.partition
        fresh = count(self._store, part.manifest, self._retry_failed)
        counter = self.meter.counters[name]
        counter.total, counter.done = fresh.total, fresh.done
        left = fresh.total - fresh.done
        self._picker.add(name, part.maker.pending(), left, part.length_class, part.cap, part.weight)

    def _settle(self) -> None:
        """Finish the partitions that have nothing left to send and nothing in flight."""
        for name, part in self._partitions.items():
            if part.waiter is None or part.in_flight or self._is_awaited(name):
                continue
            if not self.stopping and self.meter.counters[name].left:
                if not self._picker.exhausted(name):
                    continue
                if skipped := self._picker.skipped(name):
                    # Duplicates of requests that others make: once those are answered, look again.
                    if not any(map(self._is_under_way, skipped)):
                        self._scan(part)
                        self._wake.set()
                    continue
            if not self.stopping and self._is_unconfirmed(name):
                continue
            waiter, part.waiter, part.over = part.waiter, None, True
            self._picker.remove(name)
            self._group.create_task(self._finish(part, waiter))
        if not self._finished and all(p.over for p in self._partitions.values()):
            self._finished = True
            self.outcomes.put(Finished())

    def _is_unconfirmed(self, name: str) -> bool:
        """Whether a check-up of who answered its last prompts is still to come; it is hurried."""
        doubtful = [r for r in self.replicas if name in r.checkup.unconfirmed.values()]
        for replica in doubtful:
            replica.checkup.hurry()
        return bool(doubtful)

    def _is_awaited(self, name: str) -> bool:
        """A prompt of it is between two servers: out of flight, and not with the picker either."""
        between = [*self._asking.silent, *self._suspects]
        return not self.stopping and any(prompt.partition == name for prompt in between)

    async def _finish(self, part: Partition, waiter: Future[Tally]) -> None:
        """Seal its answers and give its accounting to whoever waits; others are answered meanwhile."""
        name = part.manifest.partition
        try:
            await self._seal(name)
            tally = await asyncio.to_thread(self._store.tally, part.manifest)
            if not tally.pending:
                self._store.forget_partials(name)
        except asyncio.CancelledError:
            waiter.set_exception(RunEnded("the run was ended"))
            raise
        except Exception as error:  # a fault of ours ends the mill; whoever waits must hear of it first
            waiter.set_exception(error)
            raise
        self.figures = self._figures()
        waiter.set_result(tally)

    async def _seal(self, name: str, at_least: int = 0) -> None:
        try:
            await asyncio.to_thread(self._store.seal, name, at_least)
        except StoreError as error:
            events.tell(events.Notice(f"{name}: its answers stay in the journal for now: {error}"))

    def begin_stop(self, why: str) -> None:
        if not self.stopping:
            self.stopping = why
            self._drain_until = time.monotonic() + self._profile.run.drain_timeout_s
            events.tell(events.Notice(f"stopping: {why}; requests in flight may finish"))
            self._wake.set()

    def fail(self, error: PromptmillError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        for name, part in self._partitions.items():
            self._picker.remove(name)
            part.over = True
            part.release(error)
        self.outcomes.put(Finished())

    # --- time

    async def _tick(self) -> None:
        """What happens by the clock: stop requests, the deadline, figures, sealing."""
        told = sealed = flushed = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            if self._store.stop_file.exists():
                self.begin_stop("promptmill stop was called")
            if self._deadline is not None and datetime.now() >= self._deadline:
                self.begin_stop("the time for this run is over")
            if self.stopping and now > self._drain_until:
                for replica in self.replicas:
                    for task in replica.tasks:
                        task.cancel()
            self._wake.set()  # a pause may be over
            if now - told >= _FIGURES_S and self.replicas:
                told = now
                self.figures = self._figures()
                events.tell(self.figures)
                self._warn_of_deadline(self.figures.seconds_left)
            if now - flushed >= _FLUSH_S:
                flushed = now
                self._asking.flush()
            if now - sealed >= _SEAL_S:
                sealed = now
                await self._seal_some()

    def _warn_of_deadline(self, seconds_left: float | None) -> None:
        """Once, as soon as it is known."""
        if self._warned or self._deadline is None or seconds_left is None or self.stopping:
            return
        over = seconds_left - (self._deadline - datetime.now()).total_seconds()
        if over > _DEADLINE_SLACK * seconds_left:
            self._warned = True
            late, end = events.duration(over), f"{self._deadline:%H:%M}"
            events.tell(events.Notice(f"this run ends at {end}; about {late} of work will be left"))

    async def _seal_some(self) -> None:
        for name in self._partitions:
            await self._seal(name, _SEAL_BYTES)
