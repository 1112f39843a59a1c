"""One row of a source becomes a conversation, or is rejected with a reason that can be counted.

Each format is a module; FORMATS names them, and docs/formats.md tells them to the user. A format says what it
takes for its own (`fits`) and makes messages of a row (`read`). What is done with messages that are not as
one would wish is for `policies`, the same for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts import policies
from promptmill.prompts.formats import bfcl, glaive, messages, opencodeinstruct, sharegpt, text, turns
from promptmill.prompts.formats.row import USUAL_PROMPTS, Row, text_of, tools_of
from promptmill.settings import ROLLED_OUT
from promptmill.types import Conversation, Message

Turns = list[list[Message]]
"""Messages as the source groups them: one list, or one a turn."""


@dataclass(frozen=True, slots=True)
class Format:
    """How rows of one kind are told and read."""

    fits: Callable[[Any, Mapping[str, Any]], bool]
    """Whether the prompt's value, in its row, looks like this format."""
    read: Callable[[Row], Turns | tuple[Turns, list[dict[str, Any]]]]
    """Messages, and tools where the format finds them outside a column of their own."""
    columns: tuple[str, ...] = USUAL_PROMPTS
    """Where the prompt stands, unless columns.prompt says so."""
    tools: str = "tools"
    """Where tools stand, unless columns.tools says so."""
    reads_system: bool = False
    """Whether `read` has looked at the system's column itself."""


FORMATS: dict[str, Format] = {
    "opencodeinstruct": Format(opencodeinstruct.fits, opencodeinstruct.read, opencodeinstruct.COLUMNS),
    "glaive": Format(glaive.fits, glaive.read, glaive.COLUMNS, reads_system=True),
    "bfcl": Format(bfcl.fits, bfcl.read, bfcl.COLUMNS, bfcl.TOOLS),
    "sharegpt": Format(sharegpt.fits, messages.read),
    "messages": Format(messages.fits, messages.read),
    "turns": Format(turns.fits, turns.read),
    "text": Format(text.fits, text.read),
}
"""By the name that a profile gives. `auto` takes the first that fits."""


class Choice(NamedTuple):
    """What `auto` found."""

    format: str
    column: str


def choose_format(row: Row) -> Choice:
    """The format that fits the prompt's value.

    Raises PromptRejected where the column is there and empty, so that the next row may tell, and ConfigError
    where no format fits.
    """
    for name, fmt in FORMATS.items():
        column = row.column(fmt.columns)
        if column and fmt.fits(row.data.get(column), row.data):
            _check_alone(column, row)
            return Choice(name, column)
    column = row.column(USUAL_PROMPTS)
    if column in row.data and row.data[column] in (None, []):
        raise PromptRejected("no_messages", f"{column} is empty")
    raise ConfigError(
        f"no column with prompts was recognised among {', '.join(map(str, row.data)) or 'none'}; "
        f"set columns.prompt and format ({', '.join(FORMATS)})."
    )


def _check_alone(column: str, row: Row) -> None:
    """`auto` does not leave half of a prompt out without a word: instruction and input are one."""
    if column == "input" and row.data.get("instruction") and not row.columns.prompt:
        raise ConfigError(
            "a row has both instruction and input, of which only one would be asked; "
            "join them in one column, or set columns.prompt."
        )


def to_conversation(row: Row, fmt: str, mode: str | None) -> Conversation:
    """The conversation of `row`. Raises PromptRejected with the reason."""
    chosen = FORMATS[fmt]
    found = chosen.read(row)
    source, tools = found if isinstance(found, tuple) else (found, None)
    if not chosen.reads_system:
        _put_system(source, row)
    column = row.columns.tools or chosen.tools
    tools = tools_of(row.data.get(column) if tools is None else tools, column, row)
    rollout = mode == "rollout" or (mode is None and fmt in ROLLED_OUT)
    conversation = policies.apply(source, rollout, row.policies, row.notes)
    return Conversation(id=row.id(), turns=conversation, tools=tools, location=row.location)


def _put_system(source: Sequence[list[Message]], row: Row) -> None:
    """The system column's text, in front of all."""
    if row.columns.system and (value := row.data.get(row.columns.system)):
        source[0].insert(0, {"role": "system", "content": text_of(value, row) or ""})
