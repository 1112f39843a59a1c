"""One raw row to a prompt row: read by its format, under the partition's policies, rendered and hashed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts import formats, where
from promptmill.prompts.control import ControlTokens
from promptmill.prompts.formats.row import Row
from promptmill.prompts.hashing import PromptHasher, digest
from promptmill.prompts.readers import RawRow
from promptmill.types import Conversation, PromptRow

if TYPE_CHECKING:
    from promptmill.prompts.manifest import Preparation


class RowReader:
    """Reads the rows of one partition, in order."""

    def __init__(self, preparation: Preparation) -> None:
        profile, part = preparation.profile, preparation.partition
        self._part = part
        self._renderer = preparation.renderer
        sampling = profile.sampling_for(part)
        self._samples = range(sampling.samples)
        self._chat = profile.chat.template_kwargs if profile.server.api == "chat" else None
        self._hash = PromptHasher(preparation.model, preparation.renderer.fingerprint(), sampling)
        self._cap = profile.max_new_tokens(part)
        self._context = preparation.context_tokens
        renderer = preparation.renderer
        self._control = ControlTokens(renderer.control_tokens(), renderer.marker_texts)
        self._asked: set[bytes] = set()

    def choose(self, raw: RawRow) -> formats.Choice:
        """The format of the row. Raises PromptRejected where it does not tell, ConfigError for none."""
        try:
            return formats.choose_format(self._row(raw))
        except ConfigError as error:
            raise ConfigError(f"partition {self._part.name}: {raw.location}: {error}") from None

    def read(self, index: int, raw: RawRow, fmt: str) -> tuple[PromptRow, set[str]]:
        """The prompt, and what policies did to the row. Raises PromptRejected."""
        row = self._row(raw)
        where.check(raw.data, self._part.where)
        if raw.replaced:
            row.note_surrogates()
        conversation = formats.to_conversation(row, fmt, self._part.mode)
        self._check_control(conversation, row)
        ids = self._renderer.render(conversation.turns[0], conversation.tools)
        cap = self._room(len(ids), row)
        later = conversation.turns[1:]
        hashes = [self._hash.chain(self._first(conversation, ids, sample), later) for sample in self._samples]
        self._check_asked(hashes[0][-1], row)
        prompt = PromptRow(
            row=index,
            id=conversation.id,
            location=conversation.location,
            turns=conversation.turns,
            tools=conversation.tools,
            input_ids=ids,
            prompt_hashes=hashes,
            max_new_tokens=cap,
        )
        return prompt, row.notes

    def _first(self, conversation: Conversation, ids: list[int], sample: int) -> str:
        if self._chat is None:
            return self._hash(ids, sample)
        return self._hash.of_messages(conversation.turns[0], conversation.tools, self._chat, sample)

    def _row(self, raw: RawRow) -> Row:
        return Row(raw.data, raw.location, self._part.columns, self._part.policies)

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
                "too_long", f"{tokens} prompt tokens + {self._cap} to answer exceed {self._context}"
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
