"""`promptmill show`: prompts and their answers, reasoning apart, from the store alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from promptmill.errors import ConfigError
from promptmill.prompts.manifest import load_current, read_prompts, read_rejects
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import STATUSES, Answer, PromptRow

T = TypeVar("T")

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
    partitions = [wanted.partition] if wanted.partition else names
    console = Console(highlight=False, soft_wrap=True)
    if wanted.flag == "rejected":
        return _show_rejects(console, store, partitions, wanted)
    found = list(_rows(store, partitions, wanted))
    if wanted.flag and not found:
        _check_flag(store, wanted.flag)
    chosen = _some(found, wanted)
    answers = store.lookup({h for _, row in chosen for hashes in row.prompt_hashes for h in hashes})
    for partition, row in chosen:
        _print(console, partition, row, answers)
    _tell_of_others(console, len(chosen), len(found), wanted)
    if wanted == Filter(None, wanted.partition, None, None):
        _tell_of_unanswered(console, store, partitions)
    return len(chosen)


def _some(found: list[T], wanted: Filter) -> list[T]:
    if wanted.random is not None:
        return random.sample(found, min(max(wanted.random, 0), len(found)))
    return found[:_SHOWN_BY_DEFAULT] if wanted.id is None else found


def _tell_of_others(console: Console, shown: int, found: int, wanted: Filter) -> None:
    if shown < found and wanted.random is None:
        console.print(f"{shown} of {found} rows; name an id, or ask for --random N.")


def _tell_of_unanswered(console: Console, store: Store, partitions: list[str]) -> None:
    """What is not shown because it has no answer."""
    for partition in partitions:
        if manifest := load_current(store.manifests, partition):
            counts = store.tally(manifest).counts
            if counts["pending"]:
                console.print(f"{partition}: {counts['pending']} rows are not answered yet.")
            if counts["rejected"]:
                console.print(f"{partition}: {counts['rejected']} rows are rejected; see --flag rejected.")


def _show_rejects(console: Console, store: Store, partitions: list[str], wanted: Filter) -> int:
    """Rows that cannot be asked: their place and the reason. They have no id but their place."""
    found = [
        (partition, reject)
        for partition in partitions
        if (manifest := load_current(store.manifests, partition))
        for reject in read_rejects(manifest)
        if wanted.id in (None, reject.location)
    ]
    chosen = _some(found, wanted)
    for partition, reject in chosen:
        # Not a rule: it cuts a long place off.
        _block(console, f"{partition} · {reject.location}: {reject.reason}", reject.detail, "red")
    _tell_of_others(console, len(chosen), len(found), wanted)
    return len(chosen)


def _check_flag(store: Store, flag: str) -> None:
    """Raises ConfigError for a flag that no answer has."""
    known = store.flags()
    if flag not in STATUSES and flag not in known:
        flags = f"flags that answers have: {', '.join(sorted(known))}" if known else "no answer has a flag"
        raise ConfigError(f"--flag {flag}: no such status or flag. Statuses: {', '.join(STATUSES)}; {flags}.")


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
