"""The nouns that the packages share. Plain data: no I/O, no behaviour beyond what the fields imply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

Message = dict[str, Any]
"""role, content (str), and where given: reasoning_content, tool_calls, tool_call_id, name."""

Status = Literal["answered", "truncated", "empty", "flagged", "rejected", "failed", "pending"]

STATUSES: tuple[Status, ...] = (
    "answered",
    "truncated",
    "empty",
    "flagged",
    "rejected",
    "failed",
    "pending",
)
"""Every input row ends as exactly one of these, and they sum to the rows read."""

WORST_FIRST: tuple[Status, ...] = (
    "rejected",
    "pending",
    "failed",
    "empty",
    "truncated",
    "flagged",
    "answered",
)
"""A row with several answers (samples, turns) is as its worst one."""


SHRUNK = "shrunk"
"""A flag: the answer ended at a cap that was lowered to what the context has room for."""
NO_IDS = "no_ids"
"""The flag of an answer whose server gave no token ids."""
LEFT_FOR_CALL = "left_for_tool_call"
"""Reasoning ended at a tool call, as some models do, without its closing marker."""
HARMLESS = frozenset([NO_IDS, LEFT_FOR_CALL])
"""Flags that say nothing against an answer."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One input row, understood.

    `turns[k]` is what is said before answer k: the prompt of turn k is turns[0], answer 0, turns[1], answer
    1, … turns[k]. A conversation that is answered once has one turn.
    """

    id: str
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    location: str
    """file:line, or file:row for formats without lines."""


@dataclass(frozen=True, slots=True)
class Reject:
    """An input row that cannot be used, and why."""

    location: str
    reason: str
    """Short and countable, e.g. `bad_json`."""
    detail: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A prepared partition: small, JSON-able; the prompts themselves lie in the file at `path`."""

    partition: str
    key: str
    """Hash of everything that the prompts depend on."""
    path: str
    """Parquet file of PromptRow, in input order."""
    rejects_path: str
    """JSON lines: location, reason, detail."""
    format: str
    column: str
    """Where the prompts stand, as `auto` found it or as it was set; empty where the format decides."""
    rows: int
    """Rows read: prompts + rejects."""
    prompts: int
    rejected: dict[str, int]
    """Count by reason."""
    examples: list[str]
    """At most three rejects a reason, as one line of text each."""
    notes: dict[str, int]
    """Prompts that a policy did something to, by what it did: a name in `policies.NOTES`."""
    prompt_tokens: int
    longest_prompt: int
    longest_request: int
    """Tokens of a prompt and the cap on its answer, at most."""
    digest: str
    """Hash of all prompt hashes, in order."""
    max_new_tokens: int
    identity: dict[str, Any]
    """What the prompt hashes cover besides the prompts, by setting."""

    @property
    def kind(self) -> str:
        """How its rows were read, in words."""
        return f"{self.format} in {self.column}" if self.column else self.format

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        return cls(**data)


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One row of a manifest's file."""

    row: int
    """Position among the rows read, from 0."""
    id: str
    location: str
    turns: list[list[Message]]
    tools: list[dict[str, Any]] | None
    input_ids: Sequence[int]
    """The rendered first turn."""
    prompt_hashes: list[list[str]]
    """By sample and turn."""
    max_new_tokens: int | None = None
    """The cap on its answers, where that is lower than the partition's: there is no room for more."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to make: a turn of a sample of a row."""

    prompt_hash: str
    partition: str
    input_ids: list[int]
    sample: int
    turn: int
    max_new_tokens: int
    row: PromptRow
    messages: list[Message]
    """What was rendered, earlier answers included."""
    tries: int = 0
    """Requests that failed through no fault of a server's death."""
    excused: int = 0
    """Requests that failed together with most others in flight."""
    error: str = ""
    """Why it cannot be asked at all; such a prompt is recorded as failed."""
    partial: list[int] = field(default_factory=list)
    """Output ids that an earlier request gave before its stream broke; the next one goes on from there."""

    def after_failed_try(self, excused: bool) -> Prompt:
        if excused:
            return replace(self, excused=self.excused + 1)
        return replace(self, tries=self.tries + 1)


@dataclass(frozen=True, slots=True)
class Texts:
    """An answer without token ids, taken apart by its server as far as that does so."""

    reasoning: str
    content: str
    tokens: int
    """Completion tokens, as the server counts them."""
    reasoning_tokens: int
    """Of these; 0 where it does not say."""
    has_calls: bool
    """The server made tool calls of a part of the text; that part is lost."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server returned for one request. `finish_reason` is stop or length, nothing else."""

    output_ids: list[int]
    """Empty where there are `texts`."""
    finish_reason: str
    prompt_tokens: int
    retractions: int = 0
    """Times that the server sent it back to its queue, where it tells."""
    texts: Texts | None = None
    """Of chat completions, which have no ids."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One durable record of the store; the schema of a segment, field by field."""

    prompt_hash: str
    partition: str
    sample: int
    turn: int
    status: str
    """answered, truncated, empty, flagged or failed."""
    finish_reason: str
    """stop or length; empty for a failure."""
    flags: list[str]
    prompt_ids: list[int]
    """Empty, as `output_ids` is, for an answer with the flag `no_ids`."""
    output_ids: list[int]
    reasoning: str
    content: str
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    resumed_tokens: int
    max_new_tokens: int
    """The cap that it was asked with."""
    model: str
    model_revision: str
    kv_dtype: str
    server: str
    """The life that answered."""
    created_at: str
    """UTC, ISO 8601."""
    error: str = ""
    """Why a failed prompt failed."""


@dataclass(slots=True)
class Tally:
    """The accounting of one partition."""

    partition: str
    counts: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    """As in the manifest."""

    @property
    def rows(self) -> int:
        return sum(self.counts[status] for status in STATUSES)

    @property
    def pending(self) -> int:
        return self.counts["pending"]

    def to_json(self) -> dict[str, int]:
        return {"rows": self.rows, **{status: self.counts[status] for status in STATUSES}}
