"""One request's life: sent, answered and recorded, or back to where it came from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from promptmill.errors import PromptmillError, PromptRejected, ServerBusy, ServerError, StoreError
from promptmill.generation.figures import Meter
from promptmill.generation.partition import Partition
from promptmill.generation.picker import Picker
from promptmill.generation.prompts import Recorder
from promptmill.generation.replica import Replica
from promptmill.generation.suspects import Suspects
from promptmill.store.store import Store, goes_on
from promptmill.types import Answer, Completion, Prompt

MAX_TRIES = 3


class Asking:
    """Owned by the mill's loop; `one` runs as a task a request."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        picker: Picker,
        suspects: Suspects,
        meter: Meter,
        changed: Callable[[], None],
        fail: Callable[[PromptmillError], None],
    ) -> None:
        """`changed` tells that something may be sent now, `fail` ends the run."""
        self._store = store
        self._recorder = recorder
        self._picker = picker
        self._suspects = suspects
        self._meter = meter
        self._changed = changed
        self._fail = fail
        self.silent: list[Prompt] = []
        """Interrupted before their first token by a loss that has not been judged yet."""
        self.answers = 0
        """Records made, over all servers."""

    async def one(self, prompt: Prompt, part: Partition, replica: Replica) -> None:
        """From sending it to a durable record, or back to the picker."""
        if prompt.error:
            await self.give_up(prompt, prompt.error, replica)
            return
        tokens, sent_at = 0, time.monotonic()

        def on_tokens(n: int) -> None:
            nonlocal tokens
            if not tokens and prompt.prompt_hash in self._suspects:
                self._suspects.cleared(prompt.prompt_hash)
                self._changed()  # the next one's turn
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
            await self.give_up(prompt, str(error), replica)
        except ServerBusy:
            self._put_off(prompt, replica)
        except ServerError as error:
            if await replica.turns_out_dead():
                self._interrupted(prompt, tokens)
            elif await replica.answers_others(sent_at):
                await self._failed_try(prompt, replica, error)
            else:
                self._put_off(prompt, replica)
        except PromptmillError as error:
            self._fail(error)
        else:
            await self._answered(prompt, part, replica, completion)

    async def give_up(self, prompt: Prompt, why: str, replica: Replica) -> None:
        """Record it as failed."""
        await self._record(prompt, self._recorder.failed(prompt, why, replica.server.name))

    def _interrupted(self, prompt: Prompt, tokens: int) -> None:
        """By the loss of its server, which is not its fault if it had shown a token."""
        if tokens:
            self._picker.put_ahead(prompt)
        else:
            self.silent.append(prompt)

    async def _answered(
        self, prompt: Prompt, part: Partition, replica: Replica, completion: Completion
    ) -> None:
        answer = self._recorder.answered(prompt, completion, replica.server.name, replica.kv_dtype)
        if not await self._record(prompt, answer):
            return
        replica.answers += 1
        if following := part.maker.following(prompt, answer):
            self._picker.put_ahead(following)

    def _put_off(self, prompt: Prompt, replica: Replica) -> None:
        """The server takes nothing for now, and says nothing of this prompt by that."""
        replica.pause()
        if prompt.prompt_hash in self._suspects:
            self._suspects.postponed(prompt.prompt_hash)
        else:
            self._picker.put_ahead(prompt)

    async def _failed_try(self, prompt: Prompt, replica: Replica, error: ServerError) -> None:
        """What is not the server's death counts against the prompt, up to MAX_TRIES."""
        self._suspects.cleared(prompt.prompt_hash)
        again = prompt.after_failed_try()
        if again.tries >= MAX_TRIES:
            await self.give_up(prompt, str(error), replica)
        else:
            self._picker.put_ahead(again)

    async def _record(self, prompt: Prompt, answer: Answer) -> bool:
        """Make a record durable; a record that cannot be is the end of the run."""
        try:
            await asyncio.wrap_future(self._store.put(answer))
        except StoreError as error:
            self._fail(error)
            return False
        self._suspects.cleared(prompt.prompt_hash)
        self.answers += 1
        turns_left = 0 if goes_on(answer.status) else len(prompt.row.turns) - prompt.turn - 1
        self._meter.answered(answer.partition, turns_left)
        return True
