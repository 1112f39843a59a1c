"""One run: everything that the flow's tasks share, resolved and checked before anything is started.

    with Run.open("demo", RunRequest(limit=8)) as run:
        manifest = prepare(run.preparation("B4_math"))

`Run.open` raises ConfigError before it has started or changed anything, and LockHeld where another process
works on the same store.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from promptmill import events
from promptmill.chat import ChatRenderer, read_template
from promptmill.errors import ConfigError, LaunchFailed, LockHeld, ServerError, StoreError
from promptmill.generation.mill import Lost, Mill
from promptmill.model import Model, load_tokenizer, resolve_model
from promptmill.prompts import manifest as manifests_
from promptmill.prompts.manifest import Preparation
from promptmill.prompts.sources import list_files
from promptmill.release.dataset import Release, publish
from promptmill.serving import command, gate, server
from promptmill.serving.process import choose_port, end_leftovers
from promptmill.serving.remedies import Death, Verdict, decide
from promptmill.serving.server import Server
from promptmill.settings import Profile
from promptmill.store.objects import LocalFolder, open_folder
from promptmill.store.store import Store, check_disk
from promptmill.types import Manifest, Tally

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


@dataclass(slots=True)
class Life:
    """One life of a server, for the table that people look at."""

    server: str
    started_at: str
    facts: dict[str, Any] = field(default_factory=dict)
    answers: int = 0
    cause_of_death: str = ""
    remedy: str = ""

    def to_row(self) -> dict[str, Any]:
        shown = ("slots", "kv_tokens", "context_tokens", "startup_s", "version")
        return {
            "server": self.server,
            "started": self.started_at,
            **{name: self.facts.get(name) for name in shown},
            "answers": self.answers,
            "cause of death": self.cause_of_death,
            "remedy": self.remedy,
        }


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
        self.lives: list[Life] = []
        self.deaths: list[Death] = []
        self._servers: list[Server] = []

    @classmethod
    @contextmanager
    def open(cls, profile: Profile, request: RunRequest, note: str) -> Iterator[Run]:
        """Hold the store's lock and whatever servers are launched, until the block ends."""
        check(profile, request)
        run = cls.read(profile, request)
        run.store.open(note)
        try:
            for name in end_leftovers(run.servers_folder):
                events.tell(events.Notice(f"ended server {name}, which an earlier run had left behind"))
            yield run
        finally:
            run.stop_servers()
            run.store.close()

    @classmethod
    def read(cls, profile: Profile, request: RunRequest) -> Run:
        """The same without lock or servers, for looking only."""
        store = Store(profile)
        model = resolve_model(profile)
        tokenizer = load_tokenizer(profile, model, store.manifests)
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
            context_tokens=command.context_tokens(self.profile),
        )

    def is_prepared(self, partition: str) -> bool:
        """Whether the files of an unchanged partition are still there."""
        return all(path.is_file() for path in self.preparation(partition).paths())

    def accept(self, manifests: Sequence[Manifest]) -> None:
        """Take these manifests as the partitions' current ones.

        Raises ConfigError if that would ask again for more than 5 % of a partition's answered rows, unless
        the request accepts it. Nothing has changed then.
        """
        for manifest in manifests:
            before = manifests_.load_current(self.store.manifests, manifest.partition)
            if before is not None and before.key != manifest.key and not self.request.accept_redo:
                self._check_redo(before, manifest)
        for manifest in manifests:
            manifests_.make_current(manifest, self.store.manifests)

    def mill(self, manifests: Sequence[Manifest]) -> Mill:
        return Mill(
            self.profile, self.store, self.renderer, self.model, list(manifests), self.request.retry_failed
        )

    # --- servers

    def launch(self) -> list[Server]:
        """Start the server of the next life, or take those that somebody else runs."""
        if urls := self.profile.server.urls:
            started = [server.foreign(self.profile, url) for url in urls]
        else:
            started = [server.launch(self.profile, self.model, self.servers_folder, len(self.lives) + 1)]
        for one in started:
            self._servers.append(one)
            self.lives.append(Life(one.name, f"{one.started_at:%Y-%m-%d %H:%M:%S} UTC"))
            shown = " ".join(one.process.command) if one.process else one.url
            events.tell(events.Launching(one.name, shown))
        return started

    def pass_gate(self, one: Server, manifests: Sequence[Manifest]) -> gate.Facts:
        """Wait until the server is healthy. Raises LaunchFailed; the server is ended then."""
        longest = max((m.longest_prompt + m.max_new_tokens for m in manifests if m.prompts), default=0)
        try:
            facts = gate.pass_gate(self.profile, one, self.renderer, gate.Needs(longest))
        except LaunchFailed:
            self._end(one)
            raise
        self._life(one).facts = facts.to_json()
        events.tell(events.Ready(one.name, facts.to_json()))
        return facts

    def diagnose(self, ended: Lost | LaunchFailed) -> Verdict:
        """What to do about a server that died, or one that never became healthy. It is ended for good."""
        if isinstance(ended, Lost):
            self._end(ended.server)
            death = Death(ended.server.name, "serving", ended.cause, ended.answers)
        else:
            name = self.lives[-1].server if self.lives else ""
            death = Death(name, "start", str(ended), 0, ended.permanent)
        self.deaths.append(death)
        verdict = decide(self.deaths, self.profile.server.max_relaunches)
        if self.lives:
            life = self.lives[-1]
            life.answers = death.answers
            life.cause_of_death = death.cause.splitlines()[0]
            life.remedy = ("relaunched " if verdict.relaunch else "gave up: ") + verdict.why
        if verdict.relaunch:
            limit = self.profile.server.max_relaunches
            events.tell(events.Relaunching(len(self.deaths), limit, verdict.why))
        else:
            events.tell(events.GaveUp(death.server, verdict.why))
        return verdict

    def gave_up(self, verdict: Verdict) -> ServerError:
        """The error that ends a run whose server cannot be kept alive."""
        last = self.deaths[-1]
        return LaunchFailed(
            f"gave up on the server: {verdict.why}. The last life: {last.cause}\n"
            "What was answered is kept; the next run goes on from there.",
            permanent=True,
        )

    def finish_lives(self, mill: Mill) -> None:
        """Note what the servers that are still alive have answered."""
        for name, answers in mill.answers_by_server().items():
            next(life for life in self.lives if life.server == name).answers = answers

    def stop_servers(self) -> None:
        for one in list(self._servers):
            self._end(one)

    def _end(self, one: Server) -> None:
        one.stop(self.profile.server.stop_grace_s)
        if one in self._servers:
            self._servers.remove(one)

    def _life(self, one: Server) -> Life:
        return next(life for life in reversed(self.lives) if life.server == one.name)

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
        release = publish(self.profile, self.store, self.model, manifests, self.tally(manifests))
        events.tell(events.Released(release.address, release.revision, release.new, release.rows))
        return release

    def _check_redo(self, before: Manifest, after: Manifest) -> None:
        known: dict[str, list[list[str]]] = {
            row.id: row.prompt_hashes
            for row in manifests_.read_prompts(before)
            if self.store.row_status(row.prompt_hashes, before.max_new_tokens) != "pending"
        }
        if not known:
            return
        redone = sum(
            row.id in known
            and row.prompt_hashes != known[row.id]
            and self.store.row_status(row.prompt_hashes, before.max_new_tokens) == "pending"
            for row in manifests_.read_prompts(after)
        )
        changed = sorted(
            name
            for name in {*before.identity, *after.identity}
            if before.identity.get(name) != after.identity.get(name)
        )
        if changed and redone > _REDO_SHARE * len(known):
            raise ConfigError(
                f"partition {after.partition}: {redone} of {len(known)} answered rows would be asked again, "
                f"because of: {', '.join(changed)}. Undo the change, or pass --accept-redo."
            )


def check(profile: Profile, request: RunRequest) -> None:
    """Everything that can be wrong before a run and costs little to find.

    Raises ConfigError, and LockHeld where another run is under way.
    """
    check_request(profile, request)
    command.check_engine(profile)
    command.context_tokens(profile)
    resolve_model(profile)
    read_template(profile.chat)
    lock = Store(profile).lock
    if holder := lock.holder():
        raise LockHeld(f"another run holds {lock.path}: {holder}. `promptmill stop` ends it in good order.")
    if profile.server.port and not profile.server.urls:
        choose_port(profile.server.port)
    _check_places(profile)


def check_request(profile: Profile, request: RunRequest) -> None:
    """That what is asked for exists: partitions and their sources. Raises ConfigError."""
    known = [part.name for part in profile.partitions]
    for name in request.partitions:
        if name not in known:
            raise ConfigError(f"--partition {name}: the profile has {', '.join(known)}.")
    if request.limit is not None and request.limit < 1:
        raise ConfigError(f"--limit {request.limit}: a number above 0 is wanted.")
    for part in profile.partitions:
        if not request.partitions or part.name in request.partitions:
            try:
                list_files(part.source)
            except ConfigError as error:
                raise ConfigError(f"partition {part.name}: {error}") from None


def _check_places(profile: Profile) -> None:
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


def run_note(profile_name: str) -> str:
    """Who holds the store, for whoever finds it held."""
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    return f"promptmill run {profile_name}, since {since} on {os.uname().nodename}"
