"""One run: everything that the flow's tasks share, resolved and checked before anything is started.

    with Run.open("demo", RunRequest(limit=8)) as run:
        manifest = prepare(run.preparation("B4_math"))

`Run.open` raises ConfigError before it has started or changed anything, and LockHeld where another process
works on the same store.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from promptmill import events
from promptmill.chat import UNRENDERED, ChatRenderer, read_template
from promptmill.errors import ConfigError, LockHeld, StoreError
from promptmill.generation.mill import Mill
from promptmill.model import Model, load_tokenizer, resolve_model
from promptmill.prompts import manifest as manifests_
from promptmill.prompts.manifest import Keys, Preparation
from promptmill.prompts.sources import list_files
from promptmill.release.dataset import Release, publish
from promptmill.serving import command
from promptmill.serving.process import choose_port, end_leftovers
from promptmill.serving.supervisor import Supervisor
from promptmill.settings import PartitionSettings, Profile
from promptmill.store.objects import LocalFolder, open_folder
from promptmill.store.store import Store, check_disk
from promptmill.types import Manifest, Tally

_FILES = 65_536
_REDO_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What a run is asked to do, besides its profile."""

    partitions: tuple[str, ...] = ()
    """Empty: all of them."""
    limit: int | None = None
    """Rows to read of each partition."""
    retry_failed: bool = False
    accept_redo: bool = False


class Run:
    """See the module."""

    def __init__(
        self, profile: Profile, request: RunRequest, model: Model, renderer: ChatRenderer, store: Store
    ) -> None:
        self.profile = profile
        self.request = request
        self.model = model
        self.renderer = renderer
        self.store = store
        self.servers = Supervisor(profile, model, renderer, self.servers_folder)

    @classmethod
    @contextmanager
    def open(cls, profile: Profile, request: RunRequest, note: str) -> Iterator[Run]:
        """Hold the store's lock and whatever servers are launched, until the block ends."""
        check(profile, request)
        _raise_file_limit()
        run = cls.read(profile, request)
        run.store.open(note)
        try:
            for name in end_leftovers(run.servers_folder):
                events.tell(events.Notice(f"ended server {name}, which an earlier run had left behind"))
            yield run
        finally:
            run.servers.stop_all()
            run.store.close()

    @classmethod
    def read(cls, profile: Profile, request: RunRequest, cache: Path | None = None) -> Run:
        """The same without lock or servers, for looking only. `cache`: where a tokenizer may be rebuilt."""
        store = Store(profile)
        model = resolve_model(profile)
        tokenizer = load_tokenizer(profile, model, cache or store.manifests)
        return cls(profile, request, model, ChatRenderer(tokenizer, profile.chat), store)

    @property
    def partitions(self) -> list[str]:
        """Names of the partitions that this run works on."""
        names = [part.name for part in self.profile.partitions]
        return [name for name in names if not self.request.partitions or name in self.request.partitions]

    @property
    def servers_folder(self) -> Path:
        """Logs and state files of the servers' lives."""
        return self.store.journal_path.parent / "servers"

    def preparation(self, partition: str) -> Preparation:
        return Preparation(
            profile=self.profile,
            partition=self.profile.partition(partition),
            model=self.model,
            renderer=self.renderer,
            folder=self.store.manifests,
            limit=self.request.limit,
            context_tokens=command.context_tokens(self.profile, self.model),
        )

    def is_prepared(self, partition: str) -> bool:
        """Whether the files of an unchanged partition are still there, and whole."""
        return manifests_.are_whole(*self.preparation(partition).paths())

    def prepared(self, partition: str) -> Manifest | None:
        """The partition's current manifest, if its source and settings are what they were."""
        current = manifests_.load_current(self.store.manifests, partition)
        unchanged = current is not None and current.key == self.preparation(partition).key()
        return current if unchanged else None

    def accept(self, manifests: Sequence[Manifest]) -> None:
        """Take these manifests as the partitions' current ones.

        Raises ConfigError if that would ask again for more than 5 % of a partition's answered rows, unless
        the request accepts it, or where the template is none for a partition. Nothing has changed then.
        """
        for manifest in manifests:
            check_rendered(manifest, self.profile.run.max_unrendered)
            redo = None if self.request.accept_redo else self.redo(manifest)
            if redo and redo.is_refused:
                raise ConfigError(
                    f"partition {redo.partition}: {redo}. Undo the change, or pass --accept-redo."
                )
        for manifest in manifests:
            manifests_.make_current(manifest, self.store.manifests)
            if not manifest.rows:
                events.tell(events.Notice(f"partition {manifest.partition}: its source holds no rows"))

    def longest_request_tokens(self, manifests: Sequence[Manifest]) -> int:
        """The longest prompt and its cap: what a server must have room for."""
        return max((m.longest_request for m in manifests if m.prompts), default=0)

    def mill(self, manifests: Sequence[Manifest]) -> Mill:
        return Mill(
            self.profile, self.store, self.renderer, self.model, list(manifests), self.request.retry_failed
        )

    # --- the end

    def tally(self, manifests: Iterable[Manifest]) -> list[Tally]:
        return [self.store.tally(manifest) for manifest in manifests]

    def with_others(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """These manifests and the current ones of the profile's other partitions: what a release holds."""
        here = {manifest.partition: manifest for manifest in manifests}
        names = [part.name for part in self.profile.partitions]
        known = (here.get(n) or manifests_.load_current(self.store.manifests, n) for n in names)
        return [manifest for manifest in known if manifest is not None]

    def publish(self, manifests: Sequence[Manifest]) -> Release:
        """Raises ReleaseError."""
        release = publish(
            self.profile, self.store, self.model, self.renderer, manifests, self.tally(manifests)
        )
        events.tell(events.Released(release.address, release.revision, release.new, release.rows))
        return release

    def redo(self, after: Manifest) -> Redo | None:
        """What taking this manifest would ask again on account of changed settings; None where nothing."""
        before = manifests_.load_current(self.store.manifests, after.partition)
        if before is None or before.key == after.key:
            return None

        def pending(keys: Keys) -> npt.NDArray[np.bool_]:
            return self.store.progress(keys, before.max_new_tokens).pending_rows()

        names = {*before.identity, *after.identity}
        changed = sorted(n for n in names if before.identity.get(n) != after.identity.get(n))
        if not changed:
            return None
        answered = manifests_.read_prompts(before, lambda keys: ~pending(keys))
        known = {row.id: row.prompt_hashes for row in answered}
        rows = sum(
            row.id in known and row.prompt_hashes != known[row.id]
            for row in manifests_.read_prompts(after, pending)
        )
        return Redo(after.partition, rows, len(known), changed) if rows else None


@dataclass(frozen=True, slots=True)
class Redo:
    """Answered rows of a partition that would be asked again."""

    partition: str
    rows: int
    answered: int
    changed: list[str]
    """Settings that did it."""

    @property
    def is_refused(self) -> bool:
        """More than 5 %: a run wants to be told that it is meant."""
        return self.rows > _REDO_SHARE * self.answered

    def __str__(self) -> str:
        return (
            f"{self.rows} of {self.answered} answered rows would be asked again, "
            f"because of: {', '.join(self.changed)}"
        )


def check(profile: Profile, request: RunRequest) -> None:
    """Everything that can be wrong before a run and costs little to find.

    Raises ConfigError, and LockHeld where another run is under way.
    """
    check_request(profile, request)
    command.check_engine(profile)
    command.context_tokens(profile, resolve_model(profile))
    read_template(profile.chat)
    lock = Store(profile).lock
    if holder := lock.holder():
        raise LockHeld(f"another run holds {lock.path}: {holder}. `promptmill stop` ends it in good order.")
    if profile.server.port and not profile.server.urls:
        choose_port(profile.server.port)
    check_places(profile)


def check_rendered(manifest: Manifest, most: float) -> None:
    """That the template does not refuse more than this share of the rows. Raises ConfigError."""
    refused = {reason: n for reason, n in manifest.rejected.items() if reason in UNRENDERED}
    if sum(refused.values()) > most * manifest.rows:
        reasons = ", ".join(f"{n} {reason}" for reason, n in refused.items())
        example = next((e for e in manifest.examples if any(f": {r}: " in e for r in refused)), "")
        raise ConfigError(
            f"partition {manifest.partition}: {reasons} of {manifest.rows} rows, e.g. {example}. "
            "The template does not fit them: name another in chat.template (docs/templates.md says what each "
            "reason means), or raise run.max_unrendered to go on with the rest."
        )


def check_request(profile: Profile, request: RunRequest) -> None:
    """That what is asked for exists: partitions and their sources. Raises ConfigError."""
    known = [part.name for part in profile.partitions]
    for name in request.partitions:
        if name not in known:
            raise ConfigError(f"--partition {name}: the profile has {', '.join(known)}.")
    if request.limit is not None and not 0 < request.limit <= sys.maxsize:
        raise ConfigError(f"--limit {request.limit}: a number above 0 is wanted.")
    for part in profile.partitions:
        if not request.partitions or part.name in request.partitions:
            check_source(part)
            check_apart(part, profile)


def check_source(part: PartitionSettings) -> None:
    """Raises ConfigError where the partition's source is not there."""
    try:
        list_files(part.source)
    except ConfigError as error:
        raise ConfigError(f"partition {part.name}: {error}") from None


def check_apart(part: PartitionSettings, profile: Profile) -> None:
    """That the store and the release are not read as prompts. Raises ConfigError."""
    source = Path(part.source).resolve()
    for url in (profile.store.url, profile.release.url):
        if "://" not in url and source.is_dir() and Path(url).resolve().is_relative_to(source):
            raise ConfigError(
                f"partition {part.name}: source {part.source!r} holds {url!r}, where a run keeps its own "
                "files; put the prompts into a directory of theirs."
            )


def check_places(profile: Profile) -> None:
    """Room on the local disks, and that both addresses can be written."""
    store = Store(profile)
    places = [store.folder, open_folder(profile.release.url)]
    local = {folder.path for folder in places if isinstance(folder, LocalFolder)}
    check_disk([store.journal_path.parent, *sorted(local)], profile.run.min_free_gib)
    for folder in places:
        try:
            folder.probe()
        except StoreError as error:
            raise ConfigError(str(error)) from None


def _raise_file_limit() -> None:
    """A connection is a file: the usual soft limit of 1,024 is less than a few servers' windows."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if most == resource.RLIM_INFINITY else min(_FILES, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def run_note(profile_name: str) -> str:
    """Who holds the store, for whoever finds it held."""
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"promptmill run {profile_name}, since {since} on {os.uname().nodename}"
