"""The row store: what is answered, wherever it lies. It is the truth; every cache is a shortcut to it."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from promptmill.errors import ConfigError
from promptmill.prompts.hashing import DIGEST, digest
from promptmill.prompts.manifest import Keys, read_key_arrays
from promptmill.settings import Profile
from promptmill.store.answers import Answers, known_of
from promptmill.store.index import Index, Known
from promptmill.store.journal import Journal, JournalLock, JournalReader, Piece
from promptmill.store.judgements import Judgements
from promptmill.store.objects import LocalFolder, open_folder
from promptmill.store.progress import FAILED, PENDING, Progress, is_cut_below, rank
from promptmill.store.segment_index import SegmentIndex
from promptmill.store.segments import Segments
from promptmill.types import STATUSES, WORST_FIRST, Answer, Manifest, Tally

_SEAL_ROWS = 5000
_SEAL_TOKENS = 250_000
"""Of one segment, whichever is reached first: it is made in memory, where a token takes 40 bytes."""


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
        self.judgements = Judgements(self.folder)
        """What answers were found to be since; accounting and `lookup` follow it."""
        self._index = Index()
        self._segment_index = SegmentIndex(self.journal_path.with_name(f"{self.journal_path.stem}-keys.npz"))
        self._failed_here: set[str] = set()
        self.held: Callable[[], set[str]] = set
        """Hashes of answers that may still be withdrawn: they stay in the journal."""
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
        self._index = self._segment_index.read(self._segments)
        for prompt_hash, status, reason, cap in journaled:
            self._index.learn(prompt_hash, Known(status, reason, cap))
        self.judgements.refresh(self._index)

    def known(self, prompt_hash: str) -> Known | None:
        return self._index.get(prompt_hash)

    def with_flag(self, name: str) -> set[str]:
        """Hashes of the answers of this status, or with this flag."""
        found: set[str] = set()
        for partition in self._reader.partitions():  # journal first, as in refresh
            answers = self._reader.answers(partition)
            found.update(a.prompt_hash for a in answers if name == a.status or name in a.flags)
        found.update(self._segments.flagged(name, self._segments.names()))
        found = self.judgements.with_flag(name, found)
        if name in STATUSES:  # one that was answered in the end is no longer a failure
            return {h for h in found if (known := self.known(h)) and known.status == name}
        return found

    def flags(self) -> set[str]:
        """Every flag that an answer has, or had as it was judged first."""
        found: set[str] = set()
        for partition in self._reader.partitions():
            for answer in self._reader.answers(partition):
                found.update(answer.flags)
        return found | self._segments.flags(self._segments.names()) | self.judgements.flags()

    def is_done(self, prompt_hash: str, max_new_tokens: int, retry_failed: bool = False) -> bool:
        """Whether the prompt needs no request: answered, not cut below today's cap; or failed.

        `retry_failed` asks again what failed earlier, and not what failed since this store was opened.
        """
        if prompt_hash in self._failed_here:
            return True
        known = self.known(prompt_hash)
        if known is None:
            return False
        if known.status == "failed":
            return not retry_failed
        return not is_cut_below(known, max_new_tokens)

    def progress(self, keys: Keys, max_new_tokens: int, retry_failed: bool = False) -> Progress:
        """How far the rows of `keys` are: `is_done` of all their prompts at once."""
        ranks = self._index.look_up(keys.digests, lambda known: rank(known, max_new_tokens), PENDING)
        for row, cap in keys.caps.items():
            mine = keys.of_row(row)
            ranks[mine] = self._index.look_up(keys.digests[mine], partial(rank, max_new_tokens=cap), PENDING)
        if retry_failed:
            ranks[ranks == FAILED] = PENDING
        if self._failed_here:  # also what was cut before, and cannot be asked again with more room
            here = np.array([digest(h) for h in self._failed_here.copy()], DIGEST)
            ranks[(ranks == PENDING) & np.isin(keys.digests, here)] = FAILED
        return Progress.of(keys, ranks)

    def put(self, answer: Answer) -> Future[None]:
        """Resolves when the answer is durable and known; fails with StoreError."""
        future: Future[None] = Future()
        self._journal.put_for(future, answer, partial(self._learn_answer, answer))
        return future

    async def keep(self, answer: Answer) -> None:
        """Returns when the answer is durable and known. Raises StoreError. It is kept even if cancelled."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._journal.put_for(waiter, answer, partial(self._learn_answer, answer))
        await waiter

    def put_partials(self, pieces: Sequence[Piece]) -> Future[None]:
        """Keep tokens of answers that are under way; an answer's own `put` removes its pieces."""
        return self._journal.put_partials(pieces)

    def partials(self, partition: str) -> dict[str, list[int]]:
        """Output ids of the answers that were under way, by prompt hash."""
        return self._reader.partials(partition)

    def forget_partials(self, partition: str) -> None:
        self._journal.forget_partials(partition)

    def lookup(self, hashes: Iterable[str], answers: Answers | None = None) -> dict[str, Answer]:
        """The answers to those of `hashes` that have one, the winning one each.

        Who asks again and again passes `self.answers()`, which keeps in mind where they lie.
        """
        wanted = {h for h in hashes if self.known(h) is not None}
        return self.judgements.over((answers or self.answers()).lookup(wanted))

    def everything(self, size: int) -> Iterator[dict[str, Answer]]:
        """The winning answer to every prompt as it was recorded, `size` at a time, by prompt hash."""
        seen: set[bytes] = set()
        some: dict[str, Answer] = {}
        journaled = chain.from_iterable(map(self._reader.answers, self._reader.partitions()))
        for answer in chain(journaled, self._segments.everything(self._segments.names())):
            known, key = self.known(answer.prompt_hash), digest(answer.prompt_hash)
            if key in seen or known is None or known[1:] != known_of(answer)[1:]:
                continue
            seen.add(key)
            some[answer.prompt_hash] = answer
            if len(some) == size:
                yield some
                some = {}
        if some:
            yield some

    def answers(self) -> Answers:
        return Answers(self._segments, self._reader)

    def fingerprint(self) -> str | None:
        """Another one whenever an answer has come; None while some lie in the journal alone."""
        if self._reader.partitions():
            return None
        names = [self.judgements.layer, *self._segments.names()]
        return hashlib.sha256("\n".join(names).encode()).hexdigest()

    def seal(self, partition: str, at_least: int = 0) -> int:
        """Move the partition's journaled answers to segments; returns their number.

        Nothing happens below `at_least` bytes, and what comes meanwhile stays. An answer leaves the journal
        after its segment was verified.
        """
        with self._sealing:
            if self._reader.partitions().get(partition, 0) < max(1, at_least):
                return 0
            sealed, more = 0, True
            while more:
                answers, more = _for_one_segment(self._reader.answers(partition), self.held)
                if answers:
                    self._segments.write(partition, answers)
                    self._journal.forget(answers)
                    sealed += len(answers)
            return sealed

    def withdraw(self, hashes: Sequence[str]) -> Future[None]:
        """Their answers are none: they are pending again. Of answers in the journal only."""
        return self._journal.withdraw(hashes, lambda: self._index.forget(hashes))

    def seal_all(self) -> int:
        return sum(self.seal(partition) for partition in self._reader.partitions())

    def tally(self, manifest: Manifest) -> Tally:
        """The accounting of a partition, from its manifest and what is done."""
        rows = np.zeros(len(WORST_FIRST), np.int64)
        for keys in read_key_arrays(manifest):
            progress = self.progress(keys, manifest.max_new_tokens)
            rows += np.bincount(progress.row_ranks(), minlength=len(WORST_FIRST))
        tally = Tally(manifest.partition, rejected=dict(manifest.rejected), notes=dict(manifest.notes))
        tally.counts.update(dict(zip(WORST_FIRST, rows.tolist(), strict=True)))
        tally.counts["rejected"] = sum(manifest.rejected.values())
        return tally

    def count(self, manifest: Manifest, retry_failed: bool) -> tuple[int, int]:
        """Requests in all, and those that are done: each conversation is taken to go on to its end."""
        total = done = 0
        for keys in read_key_arrays(manifest):
            progress = self.progress(keys, manifest.max_new_tokens, retry_failed)
            total += int(progress.turns.sum())
            done += int(progress.over.sum())
        return total, done

    def remember(self, key: str, value: Any) -> None:
        self._journal.remember(key, value)

    def recall(self, key: str) -> Any:
        return self._reader.recall(key)

    def _learn_answer(self, answer: Answer) -> None:
        if answer.status == "failed":
            self._failed_here.add(answer.prompt_hash)
        self._index.learn(answer.prompt_hash, known_of(answer))


def _for_one_segment(answers: Iterable[Answer], held: Callable[[], set[str]]) -> tuple[list[Answer], bool]:
    """Those that are not held, and whether there may be more than one segment takes.

    It is not looked again for what comes meanwhile: on a busy server that would have no end.
    """
    taken, tokens = [], 0
    waiting: set[str] | None = None
    for answer in answers:
        if waiting is None:
            waiting = held()  # behind the first row: no answer is read that came after this
        if answer.prompt_hash in waiting:
            continue
        taken.append(answer)
        tokens += len(answer.prompt_ids) + len(answer.output_ids)
        if len(taken) >= _SEAL_ROWS or tokens >= _SEAL_TOKENS:
            return taken, True
    return taken, False


def goes_on(status: str) -> bool:
    """Whether a conversation's next turn is asked after an answer of this status."""
    return status in ("answered", "flagged")


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


def next_pending(store: Store, hashes: Sequence[str], max_new_tokens: int, retry_failed: bool) -> int | None:
    """The turn to ask next, or None where the conversation is over."""
    for turn, prompt_hash in enumerate(hashes):
        if not store.is_done(prompt_hash, max_new_tokens, retry_failed):
            return turn
        known = store.known(prompt_hash)
        if known is None or not goes_on(known.status):
            return None
    return None
