"""The row store: what is answered, wherever it lies. It is the truth; every cache is a shortcut to it."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from promptmill.errors import ConfigError
from promptmill.prompts.manifest import read_keys
from promptmill.settings import Profile
from promptmill.store.journal import Journal, JournalLock, JournalReader, Piece
from promptmill.store.objects import LocalFolder, open_folder
from promptmill.store.segments import Segments
from promptmill.types import WORST_FIRST, Answer, Manifest, Status, Tally

SEAL_BYTES = 64_000_000
_SEAL_ROWS = 5000


class Known(NamedTuple):
    """What is kept in memory of an answer."""

    status: str
    finish_reason: str
    max_new_tokens: int


class Store:
    """Opened for reading by anybody; `open` makes this process its one writer, until `close`."""

    def __init__(self, profile: Profile) -> None:
        self.url = profile.store.url
        self.folder = open_folder(profile.store.url)
        self.journal_path = journal_path(profile)
        self.lock = JournalLock(self.journal_path)
        self._journal = Journal(self.journal_path)
        self._reader = JournalReader(self.journal_path)
        self._segments = Segments(self.folder)
        self._known: dict[str, Known] = {}
        self._failed_here: set[str] = set()
        self._sealing = threading.Lock()

    @property
    def manifests(self) -> Path:
        """Folder of prepared partitions and rebuilt tokenizers; can be made again at any time."""
        return self.journal_path.with_suffix("").with_name(self.journal_path.stem + "-manifests")

    @property
    def stop_file(self) -> Path:
        """Exists while a run is asked to stop."""
        return self.journal_path.with_name(self.journal_path.name + ".stop")

    def open(self, note: str) -> None:
        """Become the one writer. Raises LockHeld where another process is, StoreError, ConfigError."""
        with ExitStack() as undo:
            self.lock.acquire(note)
            undo.callback(self.lock.release)
            self.stop_file.unlink(missing_ok=True)
            self._journal.start()
            undo.callback(self._journal.close)
            self.refresh()
            undo.pop_all()

    def close(self) -> None:
        self._journal.close()
        self.lock.release()

    def refresh(self) -> None:
        """Read what is done. Journal first: an answer moves from there to a segment, never back."""
        journaled = list(self._reader.keys())
        self._known = {}
        for prompt_hash, status, reason, cap in chain(self._segments.keys(self._segments.names()), journaled):
            self._learn(prompt_hash, Known(status, reason, cap))

    def known(self, prompt_hash: str) -> Known | None:
        return self._known.get(prompt_hash)

    def with_flag(self, name: str) -> set[str]:
        """Hashes of the answers of this status, or with this flag."""
        found = {h for h, known in self._known.items() if known.status == name}
        for partition in self._reader.partitions():  # journal first, as in refresh
            found.update(a.prompt_hash for a in self._reader.answers(partition) if name in a.flags)
        found.update(self._segments.flagged(name, self._segments.names()))
        return found

    def is_done(self, prompt_hash: str, max_new_tokens: int, retry_failed: bool = False) -> bool:
        """Whether the prompt needs no request: answered, not cut below today's cap; or failed.

        `retry_failed` asks again what failed earlier, and not what failed since this store was opened.
        """
        known = self._known.get(prompt_hash)
        if known is None:
            return False
        if known.status == "failed":
            return not retry_failed or prompt_hash in self._failed_here
        return not (known.finish_reason == "length" and known.max_new_tokens < max_new_tokens)

    def put(self, answer: Answer) -> Future[None]:
        """Resolves when the answer is durable and known; fails with StoreError."""
        future = self._journal.put(answer)
        future.add_done_callback(lambda done: None if done.exception() else self._learn_answer(answer))
        return future

    def put_partials(self, pieces: Sequence[Piece]) -> Future[None]:
        """Keep tokens of answers that are under way; an answer's own `put` removes its pieces."""
        return self._journal.put_partials(pieces)

    def partials(self, partition: str) -> dict[str, list[int]]:
        """Output ids of the answers that were under way, by prompt hash."""
        return self._reader.partials(partition)

    def forget_partials(self, partition: str) -> None:
        self._journal.forget_partials(partition)

    def lookup(self, hashes: Iterable[str]) -> dict[str, Answer]:
        """The answers to those of `hashes` that have one, the winning one each."""
        wanted = {h for h in hashes if h in self._known}
        found: dict[str, Answer] = {}
        journaled = list(self._reader.lookup(sorted(wanted)))
        for answer in (*self._segments.lookup(wanted, self._segments.names()), *journaled):
            old = found.get(answer.prompt_hash)
            if old is None or supersedes(_known(answer), _known(old)):
                found[answer.prompt_hash] = answer
        return found

    def seal(self, partition: str, at_least: int = 0) -> int:
        """Move the partition's journaled answers to segments; returns their number.

        Nothing happens below `at_least` bytes. An answer leaves the journal after its segment was verified.
        """
        with self._sealing:
            if self._reader.partitions().get(partition, 0) < max(1, at_least):
                return 0
            sealed = 0
            while answers := list(self._reader.answers(partition, _SEAL_ROWS)):
                self._segments.write(partition, answers)
                self._journal.forget(answers)
                sealed += len(answers)
            return sealed

    def seal_all(self) -> int:
        return sum(self.seal(partition) for partition in self._reader.partitions())

    def tally(self, manifest: Manifest) -> Tally:
        """The accounting of a partition, from its manifest and what is done."""
        tally = Tally(manifest.partition, rejected=dict(manifest.rejected))
        tally.counts["rejected"] = sum(manifest.rejected.values())
        for samples in read_keys(manifest):
            tally.counts[self.row_status(samples, manifest.max_new_tokens)] += 1
        return tally

    def row_status(self, samples: Sequence[Sequence[str]], max_new_tokens: int) -> Status:
        """A row is as the worst of its samples; a sample as the first turn that stopped it."""
        found = {self._chain_status(hashes, max_new_tokens) for hashes in samples}
        return next(status for status in WORST_FIRST if status in found)

    def _chain_status(self, hashes: Sequence[str], max_new_tokens: int) -> str:
        status = "answered"
        for prompt_hash in hashes:
            if not self.is_done(prompt_hash, max_new_tokens):
                return "pending"
            here = self._known[prompt_hash].status
            if not goes_on(here):
                return here
            status = here if here == "flagged" else status
        return status

    def remember(self, key: str, value: Any) -> None:
        self._journal.remember(key, value)

    def recall(self, key: str) -> Any:
        return self._reader.recall(key)

    def _learn_answer(self, answer: Answer) -> None:
        if answer.status == "failed":
            self._failed_here.add(answer.prompt_hash)
        self._learn(answer.prompt_hash, _known(answer))

    def _learn(self, prompt_hash: str, new: Known) -> None:
        old = self._known.get(prompt_hash)
        if old is None or supersedes(new, old):
            self._known[prompt_hash] = new


def _known(answer: Answer) -> Known:
    return Known(answer.status, answer.finish_reason, answer.max_new_tokens)


def goes_on(status: str) -> bool:
    """Whether a conversation's next turn is asked after an answer of this status."""
    return status in ("answered", "flagged")


def supersedes(new: Known, old: Known) -> bool:
    """The first answer wins, unless it failed or was cut and the new one had more room."""
    if old.status == "failed":
        return new.status != "failed"
    return (
        new.status != "failed" and old.finish_reason == "length" and new.max_new_tokens > old.max_new_tokens
    )


def journal_path(profile: Profile) -> Path:
    """Where the journal lies: as set, inside a local store, or data/journal-<hash of the address>.sqlite."""
    if profile.store.journal:
        return Path(profile.store.journal)
    folder = open_folder(profile.store.url)
    if isinstance(folder, LocalFolder):
        return folder.path / "journal.sqlite"
    return Path("data") / f"journal-{hashlib.sha256(profile.store.url.encode()).hexdigest()[:12]}.sqlite"


def check_disk(folders: Iterable[Path], min_free_gib: float) -> None:
    """Raises ConfigError where a folder cannot be made or its disk has less than `min_free_gib` left."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free_gib = shutil.disk_usage(folder).free / 2**30
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be used: {error.strerror}.") from None
        if free_gib < min_free_gib:
            raise ConfigError(
                f"{folder}: {free_gib:.2f} GiB of disk are free, run.min_free_gib asks for {min_free_gib:g}. "
                "Free some space, or lower the setting."
            )


def pending_hashes(store: Store, manifest: Manifest, retry_failed: bool) -> Iterator[str]:
    """Hashes that still need a request; of a conversation with several turns, the next one only."""
    for samples in read_keys(manifest):
        for hashes in samples:
            pending = next_pending(store, hashes, manifest.max_new_tokens, retry_failed)
            if pending is not None:
                yield hashes[pending]


def next_pending(store: Store, hashes: Sequence[str], max_new_tokens: int, retry_failed: bool) -> int | None:
    """The turn to ask next, or None where the conversation is over."""
    for turn, prompt_hash in enumerate(hashes):
        if not store.is_done(prompt_hash, max_new_tokens, retry_failed):
            return turn
        known = store.known(prompt_hash)
        if known is None or not goes_on(known.status):
            return None
    return None
