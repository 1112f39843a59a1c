"""Raw rows to prompt rows, some hundred at a time: while these are hashed, the next are rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts import formats
from promptmill.prompts.hashing import PromptHasher
from promptmill.prompts.sources import RawRow
from promptmill.types import Conversation, PromptRow, Reject

if TYPE_CHECKING:
    from promptmill.prompts.manifest import Preparation

T = TypeVar("T")
U = TypeVar("U")

_CHUNK_ROWS = 200
_CHUNK_CHARACTERS = 1_000_000

Understood = list[tuple[int, Conversation | Reject]]
"""Rows with their positions, before they are rendered."""
Rendered = list[list[int] | PromptRejected]
"""Of the conversations among them, in order."""


class RowReader:
    """Reads the rows of one partition, once."""

    def __init__(self, preparation: Preparation) -> None:
        profile, part = preparation.profile, preparation.partition
        self.format: str = part.format
        """What `auto` chose, once a row could tell."""
        self._part = part
        self._renderer = preparation.renderer
        sampling = profile.sampling_for(part)
        self._samples = range(sampling.samples)
        self._chat = profile.chat.template_kwargs if profile.server.api == "chat" else None
        self._hash = PromptHasher(preparation.model, preparation.renderer.fingerprint(), sampling)
        self._cap = profile.max_new_tokens(part)
        self._context = preparation.context_tokens

    def read(self, rows: Iterable[RawRow | Reject]) -> Iterator[PromptRow | Reject]:
        """Every row in its order. Raises ConfigError where no format fits the rows at all."""
        with ThreadPoolExecutor(1, "render") as pool:
            for understood, rendered in _one_ahead(pool, self._render, self._chunks(rows)):
                ids = iter(rendered)
                for index, item in understood:
                    yield item if isinstance(item, Reject) else self._row(index, item, next(ids))

    def _chunks(self, rows: Iterable[RawRow | Reject]) -> Iterator[Understood]:
        chunk: Understood = []
        characters = 0
        for index, raw in enumerate(rows):
            item = raw if isinstance(raw, Reject) else self._understand(raw)
            chunk.append((index, item))
            if isinstance(item, Conversation):
                characters += sum(len(message["content"]) for message in item.turns[0])
            if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        yield chunk

    def _understand(self, raw: RawRow) -> Conversation | Reject:
        try:
            if self.format == "auto":
                self.format = self._choose(raw)
            return formats.to_conversation(raw, self.format, self._part.columns, self._part.mode)
        except PromptRejected as error:
            return Reject(raw.location, error.reason, error.detail)

    def _choose(self, raw: RawRow) -> str:
        try:
            return formats.choose_format(raw.data, self._part.columns)
        except ConfigError as error:
            raise ConfigError(f"partition {self._part.name}: {raw.location}: {error}") from None

    def _render(self, chunk: Understood) -> Rendered:
        conversations = (item for _, item in chunk if isinstance(item, Conversation))
        return self._renderer.render_many([(said.turns[0], said.tools) for said in conversations])

    def _row(
        self, index: int, conversation: Conversation, ids: list[int] | PromptRejected
    ) -> PromptRow | Reject:
        if not isinstance(ids, PromptRejected) and self._is_too_long(len(ids)):
            ids = PromptRejected(
                "too_long", f"{len(ids)} prompt tokens + {self._cap} to answer exceed {self._context}"
            )
        if isinstance(ids, PromptRejected):
            return Reject(conversation.location, ids.reason, ids.detail)
        later = conversation.turns[1:]
        hashes = [self._hash.chain(self._first(conversation, ids, sample), later) for sample in self._samples]
        return PromptRow(
            index, conversation.id, conversation.location, conversation.turns, conversation.tools, ids, hashes
        )

    def _first(self, conversation: Conversation, ids: list[int], sample: int) -> str:
        if self._chat is None:
            return self._hash(ids, sample)
        return self._hash.of_messages(conversation.turns[0], conversation.tools, self._chat, sample)

    def _is_too_long(self, tokens: int) -> bool:
        return self._context is not None and tokens + self._cap > self._context


def _one_ahead(pool: Executor, work: Callable[[T], U], items: Iterable[T]) -> Iterator[tuple[T, U]]:
    """Each item and what `work` makes of it in the pool; the next one is under way meanwhile."""
    before: tuple[T, Future[U]] | None = None
    for item in items:
        current = (item, pool.submit(work, item))
        if before:
            yield before[0], before[1].result()
        before = current
    if before:
        yield before[0], before[1].result()
