"""`promptmill reflag`: split and judge all answers anew, from their ids, without a server.

The ids are the record; text, flags and status are derived from them by settings and code of the day. What
comes out otherwise than it was stored becomes a layer over the store, which accounting and releases follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from promptmill.chat import ChatRenderer
from promptmill.release.quality import judge
from promptmill.run import Run, RunRequest
from promptmill.settings import Profile
from promptmill.store.judgements import differs, in_parts
from promptmill.store.store import Store
from promptmill.types import NO_IDS, SHRUNK, Answer, Completion

_AT_A_TIME = 500
_IN_A_FILE = 5000


@dataclass(slots=True)
class Changes:
    """What is judged otherwise than before."""

    answers: int = 0
    """Looked at."""
    changed: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """Answers by "old -> new" status."""
    gained: Counter[str] = field(default_factory=Counter)
    """Answers that have a flag now."""
    lost: Counter[str] = field(default_factory=Counter)
    """Answers that had it."""
    texts: int = 0
    """Answers with other reasoning or content."""

    def add(self, before: Answer, after: Answer) -> None:
        self.answers += 1
        if not differs(before, after):
            return
        self.changed += 1
        if before.status != after.status:
            self.statuses[f"{before.status} -> {after.status}"] += 1
        self.gained.update(set(after.flags) - set(before.flags))
        self.lost.update(set(before.flags) - set(after.flags))
        self.texts += (before.reasoning, before.content) != (after.reasoning, after.content)

    def to_json(self) -> dict[str, Any]:
        counters = {name: dict(getattr(self, name)) for name in ("statuses", "gained", "lost")}
        return {"answers": self.answers, "changed": self.changed, "texts": self.texts, **counters}


def reflag(profile: Profile, dry_run: bool = False) -> dict[str, Changes]:
    """Judge all answers anew; returns what changed, by partition. A dry run leaves the store as it is.

    Raises ConfigError, LockHeld where a run is under way, StoreError.
    """
    run = Run.read(profile, RunRequest())
    store = run.store
    if dry_run:
        store.refresh()
        return _look(store, run.renderer, dry_run)
    store.open("promptmill reflag")
    try:
        return _look(store, run.renderer, dry_run)
    finally:
        store.close()


def rejudged(answer: Answer, renderer: ChatRenderer) -> Answer:
    """The answer as its ids say today; one without ids is as it is."""
    if answer.status == "failed" or NO_IDS in answer.flags:
        return answer
    split = renderer.split(answer.prompt_ids, answer.output_ids)
    completion = Completion(answer.output_ids, answer.finish_reason, answer.prompt_tokens)
    status, flags = judge(completion, split, answer.max_new_tokens)
    if SHRUNK in answer.flags:  # the ids do not say it
        flags.append(SHRUNK)
    return replace(
        answer,
        status=status,
        flags=flags,
        reasoning=split.reasoning,
        content=split.content,
        reasoning_tokens=split.reasoning_tokens,
    )


def _look(store: Store, renderer: ChatRenderer, dry_run: bool) -> dict[str, Changes]:
    found: dict[str, Changes] = {}

    def changed() -> Iterator[Answer]:
        for some in store.everything(_AT_A_TIME):
            standing = store.judgements.over(some)
            for prompt_hash, answer in some.items():
                today = rejudged(answer, renderer)
                found.setdefault(answer.partition, Changes()).add(standing[prompt_hash], today)
                if differs(answer, today):
                    yield today

    if dry_run:
        for _ in changed():
            pass
    else:
        store.judgements.write(in_parts(changed(), _IN_A_FILE))
    return found
