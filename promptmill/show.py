"""`promptmill show`: prompts and their answers, reasoning apart, from the store alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from promptmill.errors import ConfigError
from promptmill.prompts.manifest import load_current, read_prompts
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import Answer, PromptRow

_SHOWN_BY_DEFAULT = 10


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows are shown; None leaves all through."""

    id: str | None
    partition: str | None
    flag: str | None
    """A flag or a status."""
    random: int | None


def show(profile: Profile, wanted: Filter) -> int:
    """Print the rows that fit; returns how many were shown. Raises ConfigError for an unknown partition."""
    names = [part.name for part in profile.partitions]
    if wanted.partition and wanted.partition not in names:
        raise ConfigError(f"--partition {wanted.partition}: the profile has {', '.join(names)}.")
    store = Store(profile)
    store.refresh()
    chosen = list(_rows(store, [wanted.partition] if wanted.partition else names, wanted))
    total = len(chosen)
    if wanted.random is not None:
        chosen = random.sample(chosen, min(max(wanted.random, 0), total))
    elif wanted.id is None:
        chosen = chosen[:_SHOWN_BY_DEFAULT]
    answers = store.lookup({h for _, row in chosen for hashes in row.prompt_hashes for h in hashes})
    console = Console(highlight=False, soft_wrap=True)
    for partition, row in chosen:
        _print(console, partition, row, answers)
    if len(chosen) < total and wanted.random is None:
        console.print(f"{len(chosen)} of {total} rows; name an id, or ask for --random N.")
    return len(chosen)


def _rows(store: Store, partitions: list[str], wanted: Filter) -> Iterator[tuple[str, PromptRow]]:
    flagged = store.with_flag(wanted.flag) if wanted.flag else None
    for partition in partitions:
        manifest = load_current(store.manifests, partition)
        for row in read_prompts(manifest) if manifest else ():
            hashes = [h for chain in row.prompt_hashes for h in chain if store.known(h)]
            if not hashes or (wanted.id is not None and row.id != wanted.id):
                continue
            if flagged is None or any(h in flagged for h in hashes):
                yield partition, row


def _print(console: Console, partition: str, row: PromptRow, answers: dict[str, Answer]) -> None:
    console.rule(f"{partition} · {row.id} · {row.location}", align="left")
    for hashes in row.prompt_hashes:
        for turn, prompt_hash in enumerate(hashes):
            for message in row.turns[turn]:
                _block(console, message["role"], str(message["content"]), "dim")
                for call in message.get("tool_calls") or []:
                    _block(console, "call", str(call.get("function", call)), "dim")
            answer = answers.get(prompt_hash)
            if answer is None:
                break
            if answer.status == "failed":
                _block(console, "failed", f"{answer.error} (hash {prompt_hash})", "red")
                break
            flags = f", {', '.join(answer.flags)}" if answer.flags else ""
            if answer.reasoning:
                _block(console, f"reasoning ({answer.reasoning_tokens} tokens)", answer.reasoning, "cyan")
            _block(
                console, f"answer ({answer.status}, {answer.finish_reason}{flags})", answer.content, "green"
            )


def _block(console: Console, title: str, text: str, style: str) -> None:
    console.print(Text(title, style=f"bold {style}"))
    console.print(Text(text))
