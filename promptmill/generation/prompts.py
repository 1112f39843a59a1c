"""From manifest rows to requests, and from answers to records; what is pure in between."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from promptmill.chat import ChatRenderer, as_message
from promptmill.errors import PromptRejected
from promptmill.generation.order import family_of, in_families
from promptmill.generation.texts import split_texts
from promptmill.model import Model
from promptmill.prompts.manifest import Keys, read_keys, read_prompts
from promptmill.release.quality import judge
from promptmill.splitting import Split
from promptmill.store.progress import Progress
from promptmill.store.store import Store, goes_on, next_pending
from promptmill.types import NO_IDS, SHRUNK, Answer, Completion, Manifest, Prompt, PromptRow, Status, Texts


class PromptMaker:
    """The prompts of one partition: what is pending, and what follows an answer."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        renderer: ChatRenderer,
        retry_failed: bool,
        kept: Callable[[Sequence[int]], list[int]],
    ) -> None:
        """`kept` are those output ids of a broken stream that the next request may go on from."""
        self._kept = kept
        self._store = store
        self._manifest = manifest
        self._renderer = renderer
        self._retry_failed = retry_failed

    def pending(self) -> Iterator[Prompt]:
        """Every prompt that needs a request now, as a stream, in the order of `order.in_families`.

        Of a conversation with several turns that is the first unanswered one; conversations that an earlier
        run left half done go on from the answers in the store.
        """
        packed = in_families(
            map(_pack, self._in_input_order()),
            family=lambda item: _family(item[0]),
            tokens=lambda item: len(item[1]),
            seed=self._manifest.partition,
        )
        return (replace(prompt, input_ids=ids.tolist()) for prompt, ids in packed)

    def _in_input_order(self) -> Iterator[Prompt]:
        halves = self._answers_of_halves()
        partials = self._store.partials(self._manifest.partition)
        for row in read_prompts(self._manifest, lambda keys: self._progress(keys).pending_rows()):
            for sample, hashes in enumerate(row.prompt_hashes):
                turn = next_pending(self._store, hashes, self._cap(row), self._retry_failed)
                if turn is None:
                    continue
                prompt = self._first(row, sample)
                try:
                    for earlier in hashes[:turn]:
                        # Another row may have had this very turn answered since the halves were read.
                        answer = halves.get(earlier) or self._store.lookup([earlier])[earlier]
                        prompt = self._next(prompt, answer)
                except PromptRejected as error:
                    prompt = _unrenderable(prompt, error)
                if partial := partials.get(prompt.prompt_hash):
                    prompt = replace(prompt, partial=self._kept(partial)[: prompt.max_new_tokens - 1])
                yield prompt

    def following(self, prompt: Prompt, answer: Answer) -> Prompt | None:
        """The next turn of the conversation, or None where it is over."""
        if prompt.turn + 1 >= len(prompt.row.turns) or not goes_on(answer.status):
            return None
        try:
            return self._next(prompt, answer)
        except PromptRejected as error:
            return _unrenderable(prompt, error)

    def _first(self, row: PromptRow, sample: int) -> Prompt:
        return Prompt(
            prompt_hash=row.prompt_hashes[sample][0],
            partition=self._manifest.partition,
            input_ids=list(row.input_ids),
            sample=sample,
            turn=0,
            max_new_tokens=self._cap(row),
            row=row,
            messages=row.turns[0],
        )

    def _cap(self, row: PromptRow) -> int:
        return row.max_new_tokens or self._manifest.max_new_tokens

    def _next(self, prompt: Prompt, answer: Answer) -> Prompt:
        turn = prompt.turn + 1
        messages = [*prompt.messages, as_message(answer), *prompt.row.turns[turn]]
        return replace(
            prompt,
            prompt_hash=prompt.row.prompt_hashes[prompt.sample][turn],
            input_ids=self._renderer.render(messages, prompt.row.tools),
            turn=turn,
            messages=messages,
            tries=0,
            excused=0,
            partial=[],
        )

    def _answers_of_halves(self) -> dict[str, Answer]:
        """The answers of conversations that stopped in the middle; there are as many as were in flight."""
        wanted: set[str] = set()
        for samples in read_keys(self._manifest, lambda keys: self._progress(keys).half_rows()):
            for hashes in samples:
                turn = next_pending(self._store, hashes, self._manifest.max_new_tokens, self._retry_failed)
                wanted.update(hashes[:turn] if turn else ())
        return self._store.lookup(wanted) if wanted else {}

    def _progress(self, keys: Keys) -> Progress:
        return self._store.progress(keys, self._manifest.max_new_tokens, self._retry_failed)


def _pack(prompt: Prompt) -> tuple[Prompt, array[int]]:
    """A block of prompts waits to be put in order: a list takes nine times as much memory."""
    bare = replace(prompt, input_ids=[], row=replace(prompt.row, input_ids=[]))
    return bare, array("i", prompt.input_ids)


class Recorder:
    """Makes the durable record of what became of a prompt."""

    def __init__(self, renderer: ChatRenderer, model: Model) -> None:
        self._renderer = renderer
        self._model = model

    def answered(self, prompt: Prompt, completion: Completion, server: str, kv_dtype: str) -> Answer:
        """`completion` is the whole answer, the tokens of earlier requests included."""
        if texts := completion.texts:
            return self._without_ids(prompt, completion, texts, server)
        split = self._renderer.split(prompt.input_ids, completion.output_ids)
        status, flags = _judged(prompt, completion, split)
        return self._record(
            prompt,
            server,
            status=status,
            finish_reason=completion.finish_reason,
            flags=flags,
            output_ids=completion.output_ids,
            reasoning=split.reasoning,
            content=split.content,
            reasoning_tokens=split.reasoning_tokens,
            resumed_tokens=len(prompt.partial),
            kv_dtype=kv_dtype,
        )

    def _without_ids(self, prompt: Prompt, completion: Completion, texts: Texts, server: str) -> Answer:
        opened, cut = self._renderer.is_opened(prompt.input_ids), completion.finish_reason == "length"
        split = split_texts(texts, cut, opened, self._renderer.marker_texts)
        status, flags = _judged(prompt, completion, split)
        record = self._record(
            prompt,
            server,
            status=status,
            output_ids=[],
            finish_reason=completion.finish_reason,
            flags=[*flags, NO_IDS],
            reasoning=split.reasoning,
            content=split.content,
            reasoning_tokens=split.reasoning_tokens,
        )
        return replace(record, prompt_ids=[], completion_tokens=texts.tokens)

    def failed(self, prompt: Prompt, reason: str, server: str) -> Answer:
        sayable = reason.encode("utf-8", "replace").decode()  # a server's words may hold lone surrogates
        return self._record(prompt, server, status="failed", output_ids=[], error=sayable)

    def _record(
        self,
        prompt: Prompt,
        server: str,
        *,
        status: str,
        output_ids: list[int],
        finish_reason: str = "",
        flags: Sequence[str] = (),
        reasoning: str = "",
        content: str = "",
        reasoning_tokens: int = 0,
        resumed_tokens: int = 0,
        kv_dtype: str = "",
        error: str = "",
    ) -> Answer:
        return Answer(
            prompt_hash=prompt.prompt_hash,
            partition=prompt.partition,
            sample=prompt.sample,
            turn=prompt.turn,
            status=status,
            finish_reason=finish_reason,
            flags=list(flags),
            prompt_ids=prompt.input_ids,
            output_ids=output_ids,
            reasoning=reasoning,
            content=content,
            prompt_tokens=len(prompt.input_ids),
            completion_tokens=len(output_ids),
            reasoning_tokens=reasoning_tokens,
            resumed_tokens=resumed_tokens,
            max_new_tokens=prompt.max_new_tokens,
            model=self._model.name,
            model_revision=self._model.revision,
            kv_dtype=kv_dtype,
            server=server,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            error=error,
        )


def _judged(prompt: Prompt, completion: Completion, split: Split) -> tuple[Status, list[str]]:
    """Status and flags; one of them says that the context had no room for the partition's cap."""
    status, flags = judge(completion, split, prompt.max_new_tokens)
    lowered = prompt.row.max_new_tokens is not None
    return status, [*flags, SHRUNK] if status == "truncated" and lowered else flags


def _family(prompt: Prompt) -> Hashable:
    """Samples of a row stay together as well: they share all of their prompt."""
    family = family_of(prompt.row)
    return prompt.row.row if family is None and len(prompt.row.prompt_hashes) > 1 else family


def _unrenderable(prompt: Prompt, error: PromptRejected) -> Prompt:
    """The turn behind `prompt`, which could not be rendered, so that its failure has a key."""
    turn = prompt.turn + 1
    return replace(
        prompt,
        prompt_hash=prompt.row.prompt_hashes[prompt.sample][turn],
        turn=turn,
        input_ids=[],
        error=f"next turn: {error}",
    )
