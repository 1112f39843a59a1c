"""The mill: keeps servers busy and makes every answer durable.

It runs one asyncio loop (loop.py) in one thread of its own, from `start` to `close`. Other threads call:

    generate(partition)   waits until that partition needs nothing more; raises ServerDied when the last
                          server is lost, and may then be called again: it goes on from the store
    attach(server, facts) a healthy server joins
    wait(timeout_s)       the next thing that the owner must know: a server Lost, or Finished
"""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from queue import Empty

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import PromptmillError
from promptmill.generation.loop import Finished, Loop, RunEnded
from promptmill.memory import rare_collections, share_one_arena
from promptmill.model import Model
from promptmill.serving.facts import Facts
from promptmill.serving.server import Lost, Server
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import Manifest, Tally

__all__ = ["Finished", "Lost", "Mill", "MillBroke", "RunEnded"]


class MillBroke(PromptmillError):
    """A programming error stopped the mill; what was answered is in the store."""


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
        self._loop = Loop(profile, store, renderer, model, manifests, retry_failed)
        self._thread = threading.Thread(target=self._main, name="mill", daemon=True)
        self._quiet = ExitStack()

    def start(self) -> None:
        """Count what is pending, and start the loop's thread."""
        self._loop.count()
        share_one_arena()
        gc.collect()
        self._quiet.enter_context(rare_collections())
        self._thread.start()
        self._loop.ready.wait()

    def close(self) -> None:
        """End the loop and its tasks, and seal what is in the journal. Requests in flight are abandoned."""
        if self._thread.is_alive():
            self.fail(RunEnded("the run was ended"))
            self._post(self._loop.close)
            self._thread.join()
            self._quiet.close()

    def __enter__(self) -> Mill:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def needs_server(self) -> bool:
        """Whether a server would have anything to do."""
        return self.pending() > 0 and not self.stopping and self.failure is None

    def pending(self) -> int:
        """Requests that are known to be needed, over all partitions that are not over (or given up)."""
        return self._loop.pending()

    def is_pending(self, partition: str) -> bool:
        return self._loop.meter.counters[partition].left > 0

    def done(self) -> int:
        return sum(c.done for c in self._loop.meter.counters.values())

    def generate(self, partition: str) -> Tally:
        """Wait until the partition needs nothing more, or the run is stopped.

        Raises ServerDied when the last server is lost (call again), and what ended the run otherwise.
        """
        if self.failure is not None:
            raise self.failure
        waiter: Future[Tally] = Future()
        self._post(lambda: self._loop.enter(partition, waiter))
        return waiter.result()

    def attach(self, server: Server, facts: Facts) -> None:
        """A server that passed the gate joins."""
        joining = self._loop.join(server, facts)
        asyncio.run_coroutine_threadsafe(joining, self._loop.asyncio_loop).result()

    def wait(self, timeout_s: float) -> Lost | Finished | None:
        """What happened, or None after `timeout_s`."""
        with suppress(Empty):
            return self._loop.outcomes.get(timeout=timeout_s)
        return None

    def is_served(self) -> bool:
        """Whether a server is attached that has not been lost."""
        return bool(self._loop.replicas)

    def stop(self, why: str) -> None:
        """Send nothing more; what is in flight may finish, for at most run.drain_timeout_s."""
        self._post(lambda: self._loop.begin_stop(why))

    def fail(self, error: PromptmillError) -> None:
        """End the run: every waiting and future `generate` raises `error`."""
        self._post(lambda: self._loop.fail(error))

    @property
    def stopping(self) -> str:
        """Why the run is being stopped; empty while it is not."""
        return self._loop.stopping

    @property
    def failure(self) -> PromptmillError | None:
        return self._loop.failure

    def answers_by_server(self) -> dict[str, int]:
        """Answers that each server alive has finished."""
        return {replica.server.name: replica.answers for replica in list(self._loop.replicas)}

    def figures(self) -> events.Figures:
        return self._loop.figures

    def _main(self) -> None:
        try:
            asyncio.run(self._loop.run())
        except Exception as error:  # noqa: BLE001  a fault of ours; nobody may wait for ever because of it
            self._loop.fail(MillBroke("".join(traceback.format_exception(error))))

    def _post(self, action: Callable[[], None]) -> None:
        self._loop.asyncio_loop.call_soon_threadsafe(action)
