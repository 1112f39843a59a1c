"""Raw rows to prompt rows: read by their format, under the partition's policies, rendered and hashed.

Some hundred at a time, as that is the quickest way to render them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from promptmill.encoding import Ids
from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts import formats, where
from promptmill.prompts.control import ControlTokens
from promptmill.prompts.formats.row import Row
from promptmill.prompts.hashing import PromptHasher, digest
from promptmill.prompts.readers import RawRow
from promptmill.types import Conversation, PromptRow, Reject

if TYPE_CHECKING:
    from promptmill.prompts.manifest import Preparation

_CHUNK_ROWS = 200
_CHUNK_CHARACTERS = 1_000_000
_DETAIL = 1000


@dataclass(frozen=True, slots=True)
class Understood:
    """A row that is a conversation, before it is rendered."""

    index: int
    conversation: Conversation
    row: Row


Prepared = tuple[PromptRow, set[str]]
"""A prompt, and what policies did to its row."""
Chunk = list[Understood | Reject]


class RowReader:
    """Reads the rows of one partition, in order, once."""

    def __init__(self, preparation: Preparation) -> None:
        profile, part = preparation.profile, preparation.partition
        self.chosen = formats.Choice(part.format, part.columns.prompt)
        """The format; what `auto` chose, once a row could tell."""
        self._part = part
        self._renderer = renderer = preparation.renderer
        sampling = profile.sampling_for(part)
        self._samples = range(sampling.samples)
        self._chat = profile.chat.template_kwargs if profile.server.api == "chat" else None
        self._hash = PromptHasher(preparation.model, renderer.fingerprint(), sampling)
        self._cap = profile.max_new_tokens(part)
        self._context = preparation.context_tokens
        self._control = ControlTokens(renderer.control_tokens(), renderer.marker_texts)
        self._asked: set[bytes] = set()

    def read(self, rows: Iterable[RawRow | Reject]) -> Iterator[Prepared | Reject]:
        """Every row in its order. Raises ConfigError where no format fits the rows at all."""
        for chunk in self._chunks(rows):
            ids = iter(self._render(chunk))
            for item in chunk:
                yield item if isinstance(item, Reject) else self._prepared(item, next(ids))

    def _chunks(self, rows: Iterable[RawRow | Reject]) -> Iterator[Chunk]:
        chunk: Chunk = []
        characters = 0
        for index, raw in enumerate(rows):
            item = _cut(raw) if isinstance(raw, Reject) else self._understood(index, raw)
            chunk.append(item)
            if isinstance(item, Understood):
                characters += sum(len(message["content"]) for message in item.conversation.turns[0])
            if len(chunk) == _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, characters = [], 0
        yield chunk

    def _understood(self, index: int, raw: RawRow) -> Understood | Reject:
        row = Row(raw.data, raw.location, self._part.columns, self._part.policies)
        try:
            if self.chosen.format == "auto":
                self.chosen = self._choose(row)
            where.check(raw.data, self._part.where)
            if raw.replaced:
                row.note_surrogates()
            conversation = formats.to_conversation(row, self.chosen.format, self._part.mode)
            self._check_control(conversation, row)
        except PromptRejected as error:
            return _cut(Reject(raw.location, error.reason, error.detail))
        return Understood(index, conversation, row)

    def _choose(self, row: Row) -> formats.Choice:
        try:
            return formats.choose_format(row)
        except ConfigError as error:
            raise ConfigError(f"partition {self._part.name}: {row.location}: {error}") from None

    def _render(self, chunk: Chunk) -> list[Ids | PromptRejected]:
        conversations = (item.conversation for item in chunk if isinstance(item, Understood))
        return self._renderer.render_many([(said.turns[0], said.tools) for said in conversations])

    def _prepared(self, item: Understood, ids: Ids | PromptRejected) -> Prepared | Reject:
        try:
            if isinstance(ids, PromptRejected):
                raise ids
            return self._hashed(item, ids), item.row.notes
        except PromptRejected as error:
            return _cut(Reject(item.row.location, error.reason, error.detail))

    def _hashed(self, item: Understood, ids: Ids) -> PromptRow:
        """Raises PromptRejected."""
        conversation = item.conversation
        cap = self._room(len(ids), item.row)
        later = conversation.turns[1:]
        hashes = [self._hash.chain(self._first(conversation, ids, sample), later) for sample in self._samples]
        self._check_asked(hashes[0][-1], item.row)
        return PromptRow(
            row=item.index,
            id=conversation.id,
            location=conversation.location,
            turns=conversation.turns,
            tools=conversation.tools,
            input_ids=ids,
            prompt_hashes=hashes,
            max_new_tokens=cap,
        )

    def _first(self, conversation: Conversation, ids: Ids, sample: int) -> str:
        if self._chat is None:
            return self._hash(ids, sample)
        return self._hash.of_messages(conversation.turns[0], conversation.tools, self._chat, sample)

    def _check_control(self, conversation: Conversation, row: Row) -> None:
        if token := self._control.find(conversation.turns, conversation.tools):
            if row.policies.control_tokens == "reject":
                raise PromptRejected("control_token", f"the text holds {token!r}, which is one token")
            row.notes.add("control_tokens_kept")

    def _room(self, tokens: int, row: Row) -> int | None:
        """What the row's answer is capped at, where that is less than the partition's cap."""
        if self._context is None or tokens + self._cap <= self._context:
            return None
        room = self._context - tokens
        if row.policies.too_long == "reject" or room < row.policies.shrink_to_at_least:
            raise PromptRejected(
                "too_long",
                f"{tokens} prompt tokens + {self._cap} to answer exceed the {self._context} of one request",
            )
        row.notes.add("too_long_shrunk")
        return room

    def _check_asked(self, prompt_hash: str, row: Row) -> None:
        key = digest(prompt_hash)
        if key not in self._asked:
            self._asked.add(key)
        elif row.policies.duplicates == "reject":
            raise PromptRejected("duplicate", "an earlier row asks the same")
        else:
            row.notes.add("duplicate_joined")


def _cut(reject: Reject) -> Reject:
    return Reject(reject.location, reject.reason, reject.detail[:_DETAIL])
