"""One request's life: sent, answered and recorded, or back to where it came from."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from promptmill.errors import PromptmillError, PromptRejected, ServerBusy, ServerError, StoreError
from promptmill.generation.figures import Meter
from promptmill.generation.partition import Partition
from promptmill.generation.picker import Picker
from promptmill.generation.prompts import Recorder
from promptmill.generation.replica import Replica
from promptmill.generation.suspects import Suspects
from promptmill.generation.window import RequestSizes
from promptmill.serving.client import Request
from promptmill.store.journal import Piece
from promptmill.store.store import Store, goes_on
from promptmill.types import Answer, Completion, Prompt

MAX_TRIES = 3
MAX_EXCUSED = 3
"""Tries that failed together with most others and cost nothing; or a server that is sick for good would be
asked for ever."""
RETRY_AFTER_S = (1.0, 5.0)
"""Errors come in bursts, and one is not to use up every try of a prompt."""


class _Stream:
    """What has come of one request so far."""

    def __init__(self, prompt: Prompt, resumable: bool) -> None:
        self.prompt = prompt
        self.sent_at = time.monotonic()
        self.received = array("I")
        self._resumable = resumable
        self._flushed = 0

    @property
    def context_tokens(self) -> int:
        """What it holds on the server, prompt included."""
        return len(self.prompt.input_ids) + len(self.prompt.partial) + len(self.received)

    def new_piece(self) -> Piece | None:
        """What has come since the last piece, if it is of use to a later request."""
        start, end = self._flushed, len(self.received)
        if not self._resumable or start == end:
            return None
        self._flushed = end
        prompt = self.prompt
        at = len(prompt.partial) + start
        return Piece(prompt.prompt_hash, prompt.partition, at, self.received[start:end])


class Asking:
    """Owned by the mill's loop; `one` runs as a task a request."""

    def __init__(
        self,
        store: Store,
        recorder: Recorder,
        picker: Picker,
        sizes: RequestSizes,
        suspects: Suspects,
        meter: Meter,
        changed: Callable[[], None],
        fail: Callable[[PromptmillError], None],
        go_on: Callable[[Prompt, Replica], None],
        replicas: Sequence[Replica],
    ) -> None:
        """`changed` tells that something may be sent now, `fail` ends the run, `go_on` asks a next turn."""
        self._store = store
        self._recorder = recorder
        self._picker = picker
        self._sizes = sizes
        self._suspects = suspects
        self._meter = meter
        self._changed = changed
        self._fail = fail
        self._go_on = go_on
        self._replicas = replicas
        self._streams: set[_Stream] = set()
        self._last_kept: Future[None] = Future()
        """Of the pieces that were handed to the journal last; it writes in order."""
        self._last_kept.set_result(None)
        self.silent: list[Prompt] = []
        """Interrupted before their first token by a loss that has not been judged yet."""
        self.answers = 0
        """Records made, over all servers."""
        self.last_failure = ""

    async def one(self, prompt: Prompt, part: Partition, replica: Replica) -> None:
        """From sending it to a durable record, or back to the picker."""
        if prompt.error:
            await self.give_up(prompt, prompt.error, replica)
            return
        stream = _Stream(prompt, part.resumable)
        self._streams.add(stream)

        def on_tokens(ids: list[int]) -> None:
            if not stream.received and prompt.prompt_hash in self._suspects:
                self._suspects.cleared(prompt.prompt_hash)
                self._changed()  # the next one's turn
            self._meter.received(prompt.partition, len(ids), stream.context_tokens)
            stream.received.extend(ids)
            replica.saw_tokens(len(ids))

        self._meter.sent(prompt.partition, len(prompt.input_ids), len(prompt.partial))
        try:
            completion = await replica.client.complete(self._request(prompt, part), on_tokens)
        except asyncio.CancelledError:
            # It was stuck; another server may have it.
            self._interrupted(self._end(stream, part), stream, replica)
            raise
        except PromptRejected as error:
            await self._rejected(self._end(stream, part), replica, error)
        except ServerBusy as error:
            self._put_off(self._end(stream, part), replica, error.retry_after_s)
        except ServerError as error:
            await self._broken(self._end(stream, part), stream, replica, error)
        except PromptmillError as error:
            self._end(stream, part)
            self._fail(error)
        else:
            self._close(stream)
            await self._answered(prompt, part, replica, completion)

    def _request(self, prompt: Prompt, part: Partition) -> Request:
        return Request(
            input_ids=[*prompt.input_ids, *prompt.partial] if prompt.partial else prompt.input_ids,
            sampling=part.sampling,
            max_new_tokens=prompt.max_new_tokens - len(prompt.partial),
            sample=prompt.sample,
            key=prompt.prompt_hash,
            on_trial=prompt.prompt_hash in self._suspects,
            messages=prompt.messages,
            tools=prompt.row.tools,
        )

    async def _broken(self, prompt: Prompt, stream: _Stream, replica: Replica, error: ServerError) -> None:
        """Whose fault it was: of a server that died, of one that fails everybody, or of this prompt."""
        broke_at = time.monotonic()
        replica.breaks.broke(broke_at, len(replica.tasks))
        try:
            died = await replica.turns_out_dead()
            prompts_fault = not died and await replica.answers_others(stream.sent_at)
        except asyncio.CancelledError:
            self._interrupted(prompt, stream, replica)
            raise
        if died:
            self._interrupted(prompt, stream, replica)
        elif prompts_fault:
            excused = prompt.excused < MAX_EXCUSED and replica.breaks.together(broke_at)
            await self._failed_try(prompt, replica, error, excused)
        else:
            self._put_off(prompt, replica)

    def flush(self) -> None:
        """Keep what has come since the last time of all answers that are under way."""
        self._keep([piece for stream in self._streams if (piece := stream.new_piece())])

    async def flushed(self) -> None:
        """Until all that was to be kept is durable."""
        with suppress(StoreError):  # it has ended the run already
            await asyncio.wrap_future(self._last_kept)

    def _end(self, stream: _Stream, part: Partition) -> Prompt:
        """Its stream has broken: keep what came of it, and return the prompt that goes on from there."""
        self._close(stream)
        self._keep([piece] if (piece := stream.new_piece()) else [])
        prompt = stream.prompt
        kept = part.kept([*prompt.partial, *stream.received])
        return replace(prompt, partial=kept[: prompt.max_new_tokens - 1])

    def _close(self, stream: _Stream) -> None:
        self._streams.discard(stream)
        self._meter.forecast.left(stream.prompt.partition, stream.context_tokens)

    def _keep(self, pieces: list[Piece]) -> None:
        if not pieces:
            return
        loop = asyncio.get_running_loop()

        def look(kept: Future[None]) -> None:  # in the journal's thread
            if isinstance(error := kept.exception(), PromptmillError):
                with suppress(RuntimeError):  # the loop has ended meanwhile
                    loop.call_soon_threadsafe(self._fail, error)

        self._last_kept = self._store.put_partials(pieces)
        self._last_kept.add_done_callback(look)

    def start_over(self, prompt: Prompt) -> None:
        """Ask it once more without the tokens that it had: they may be to blame."""
        self._keep([Piece(prompt.prompt_hash, prompt.partition, 0, [])])
        self._suspects.cleared(prompt.prompt_hash)
        self._picker.put_ahead(replace(prompt, partial=[]))

    async def give_up(self, prompt: Prompt, why: str, replica: Replica) -> None:
        """Record it as failed."""
        self.last_failure = why
        await self._record(prompt, self._recorder.failed(prompt, why, replica.server.name))

    def _interrupted(self, prompt: Prompt, stream: _Stream, replica: Replica) -> None:
        """By the loss of its server, which is not its fault if it had shown a token."""
        if not stream.received:
            self.silent.append(prompt)
        elif replica.checkup.sick:
            self.start_over(prompt)  # its tokens are worth no more than its answers
        else:
            self._picker.put_ahead(prompt)

    async def _answered(
        self, prompt: Prompt, part: Partition, replica: Replica, completion: Completion
    ) -> None:
        if self._is_void(prompt):
            return
        if prompt.partial:
            completion = replace(completion, output_ids=[*prompt.partial, *completion.output_ids])
        answer = self._recorder.answered(prompt, completion, replica.server.name, replica.kv_dtype)
        if answer.status == "empty" and part.varies and prompt.tries + 1 < MAX_TRIES:
            self.start_over(prompt.after_failed_try(excused=False))
            return
        if not await self._record(prompt, answer):
            return
        replica.answers += 1
        replica.checkup.answered(prompt.prompt_hash, prompt.partition, answer.status == "answered")
        for each in self._replicas:
            each.checkup.followed(_earlier(prompt), prompt.prompt_hash, prompt.partition)
        self._meter.retractions += completion.retractions
        self._picker.finished(prompt.partition, answer.completion_tokens)
        self._sizes.finished(answer.prompt_tokens, answer.completion_tokens)
        truncated = answer.finish_reason == "length"
        self._meter.forecast.finished(prompt.partition, answer.completion_tokens, truncated)
        if following := part.maker.following(prompt, answer):
            self._go_on(following, replica)

    def _is_void(self, prompt: Prompt) -> bool:
        """Whether the answer that it follows was withdrawn meanwhile; its conversation is listed anew."""
        return any(self._store.known(prompt_hash) is None for prompt_hash in _earlier(prompt))

    async def _rejected(self, prompt: Prompt, replica: Replica, error: PromptRejected) -> None:
        """A prompt that is refused with the tokens that it had is asked once more without them."""
        if not prompt.partial:
            await self.give_up(prompt, str(error), replica)
            return
        self.start_over(prompt)

    def _put_off(self, prompt: Prompt, replica: Replica, pause_s: float = 0.0) -> None:
        """The server takes nothing for now, and says nothing of this prompt by that."""
        replica.pause(pause_s)
        if prompt.prompt_hash in self._suspects:
            self._suspects.postponed(prompt.prompt_hash)
        else:
            self._picker.put_ahead(prompt)

    async def _failed_try(self, prompt: Prompt, replica: Replica, error: ServerError, excused: bool) -> None:
        """What is not the server's death counts against the prompt, up to MAX_TRIES, unless it is excused."""
        self._suspects.cleared(prompt.prompt_hash)
        again = prompt.after_failed_try(excused)
        if again.tries >= MAX_TRIES:
            await self.give_up(prompt, str(error), replica)
            return
        self._changed()  # a suspect's place is free
        try:
            await asyncio.sleep(RETRY_AFTER_S[min(prompt.tries + prompt.excused, 1)])
        finally:  # also where its server is lost meanwhile
            self._picker.put_ahead(again)

    async def _record(self, prompt: Prompt, answer: Answer) -> bool:
        """Make a record durable; a record that cannot be is the end of the run."""
        keeping = asyncio.ensure_future(self._store.keep(answer))
        while not keeping.done():  # whoever cancels this request comes too late
            with suppress(asyncio.CancelledError):
                await asyncio.wait([keeping])
        try:
            keeping.result()
        except StoreError as error:
            self._fail(error)
            return False
        self._suspects.cleared(prompt.prompt_hash)
        self.answers += 1
        turns_left = 0 if goes_on(answer.status) else len(prompt.row.turns) - prompt.turn - 1
        self._meter.ended(answer.partition, answer.status == "failed", turns_left)
        return True


def _earlier(prompt: Prompt) -> list[str]:
    """The hashes of the turns before it."""
    return prompt.row.prompt_hashes[prompt.sample][: prompt.turn]
