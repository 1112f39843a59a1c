"""Publishes a release: shards, card and manifest first, the pointer `latest.json` last.

A release is written locally, loaded with `load_dataset` in a process of its own, put to its address object by
object, each verified, and only then pointed to. Whatever breaks before that leaves the previous release in
force. The same rows give the same fingerprint, and then nothing is published; where not even a prompt or an
answer has come since, none is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from promptmill import __version__
from promptmill.chat import ChatRenderer
from promptmill.errors import ReleaseError, ReleaseRefused, StoreError
from promptmill.model import Model
from promptmill.prompts.manifest import read_prompts
from promptmill.release.card import write_card
from promptmill.release.shards import Shards
from promptmill.release.views import SCHEMAS, Asked, rows_of
from promptmill.settings import Profile
from promptmill.store.answers import Answers
from promptmill.store.objects import Folder, LocalFolder, open_folder
from promptmill.store.store import Store
from promptmill.types import Manifest, Tally

LAYOUT_VERSION = 2
POINTER = "latest.json"
_PROMPTS_AT_A_TIME = 256
_READ_BACK_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Release:
    """What stands at the release's address now."""

    revision: str
    address: str
    new: bool
    rows: dict[str, int]
    """By view."""


def publish(
    profile: Profile,
    store: Store,
    model: Model,
    renderer: ChatRenderer,
    manifests: Sequence[Manifest],
    tallies: Sequence[Tally],
) -> Release:
    """Publish the answers to `manifests`, or find that nothing changed. Raises ReleaseError."""
    pending = sum(tally.pending for tally in tallies)
    if pending and not profile.release.allow_incomplete:
        raise ReleaseRefused(
            f"{pending} rows are pending, so there is no release. Run again to answer them, "
            "or set release.allow_incomplete = true."
        )
    folder = open_folder(profile.release.url)
    try:
        return _Publisher(profile, store, model, renderer, folder).publish(manifests, tallies)
    except (StoreError, OSError, pa.ArrowException) as error:
        raise ReleaseError(f"the release was not published: {error}") from error


class _Publisher:
    def __init__(
        self, profile: Profile, store: Store, model: Model, renderer: ChatRenderer, folder: Folder
    ) -> None:
        self._profile = profile
        self._store = store
        self._model = model
        self._renderer = renderer
        self._folder = folder

    def publish(self, manifests: Sequence[Manifest], tallies: Sequence[Tally]) -> Release:
        standing, inputs = self._in_force(), self._inputs(manifests)
        remembered = f"release {self._folder.url}"
        if standing and inputs and self._store.recall(remembered) == [standing["revision"], inputs]:
            return self._unchanged(standing)
        release = self._build(manifests, tallies, standing)
        if inputs:
            self._store.remember(remembered, [release.revision, inputs])
        return release

    def _build(
        self, manifests: Sequence[Manifest], tallies: Sequence[Tally], standing: dict[str, Any] | None
    ) -> Release:
        # Staged beside a local release, so that space is taken, and missed, on the disk that needs it.
        stage = (
            self._folder.path if isinstance(self._folder, LocalFolder) else self._store.journal_path.parent
        )
        stage.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".staging-", dir=stage) as scratch:
            staged = Path(scratch)
            answers = self._store.answers()
            rows: dict[str, int] = dict.fromkeys(self._profile.release.views, 0)
            files: dict[str, dict[str, Any]] = {}
            for manifest in manifests:
                # A view needs a file to be loaded: the first partition writes one even if it is empty.
                always = manifest is manifests[0]
                for view, shards in self._write_shards(staged, manifest, answers, always).items():
                    for path, n in shards:
                        files[str(path.relative_to(staged))] = {"rows": n, **_describe(path)}
                        rows[view] += n
            fingerprint = _fingerprint(files)
            if standing and standing.get("fingerprint") == fingerprint:
                return self._unchanged(standing)
            return self._put(staged, files, rows, fingerprint, manifests, tallies)

    def _how_asked(self, manifest: Manifest) -> dict[str, str]:
        part = self._profile.partition(manifest.partition)
        return {"mode": part.mode_of(manifest.format), "renderer": str(manifest.identity.get("chat", ""))}

    def _inputs(self, manifests: Sequence[Manifest]) -> str | None:
        """A hash of what a release is made from; None where that cannot be told without reading it."""
        answers = self._store.fingerprint()
        if answers is None:
            return None
        prompts = [
            (m.partition, m.key, (stat := Path(m.path).stat()).st_size, stat.st_mtime_ns) for m in manifests
        ]
        settings = self._profile.release
        made_by = [LAYOUT_VERSION, __version__, settings.views, settings.shard_mb]
        return hashlib.sha256(json.dumps([*made_by, prompts, answers]).encode()).hexdigest()

    def _unchanged(self, standing: dict[str, Any]) -> Release:
        revision = standing["revision"]
        return Release(revision, self._folder.address(revision), False, standing["rows"])

    def _in_force(self) -> dict[str, Any] | None:
        """The manifest of the release that is pointed to, if its files are there."""
        pointer = self._folder.read_bytes(POINTER)
        if pointer is None:
            return None
        try:
            revision = json.loads(pointer)["revision"]
        except (ValueError, KeyError, TypeError):
            raise ReleaseError(
                f"{self._folder.address(POINTER)} is not a release pointer: move it away."
            ) from None
        manifest = self._folder.read_bytes(f"{revision}/manifest.json")
        if manifest is None:
            return None
        described: dict[str, Any] = {**json.loads(manifest), "revision": revision}
        names = set(self._folder.names(revision))
        whole = all(f"{revision}/{name}" in names for name in described.get("files", [""]))
        return described if whole else None

    def _put(
        self,
        staged: Path,
        files: dict[str, dict[str, Any]],
        rows: dict[str, int],
        fingerprint: str,
        manifests: Sequence[Manifest],
        tallies: Sequence[Tally],
    ) -> Release:
        now = datetime.now(UTC)
        revision = f"{now:%Y%m%dT%H%M%S}-{fingerprint[:8]}"
        card = write_card(rows, tallies, self._model.name, self._model.revision, __version__)
        (staged / "README.md").write_text(card, encoding="utf-8")
        manifest = {
            "layout": LAYOUT_VERSION,
            "promptmill": __version__,
            "revision": revision,
            "created_at": now.isoformat(timespec="seconds"),
            "fingerprint": fingerprint,
            "model": self._model.name,
            "model_revision": self._model.revision,
            "rows": rows,
            "files": files,
            "accounting": {tally.partition: tally.to_json() for tally in tallies},
            "partitions": {m.partition: self._how_asked(m) for m in manifests},
            "renderer": self._renderer.describe(),
            "rejected": {tally.partition: tally.rejected for tally in tallies if tally.rejected},
            "policies": {tally.partition: tally.notes for tally in tallies if tally.notes},
            "profile": self._profile.masked(),
        }
        (staged / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        read_back(staged, rows)
        for name in [*sorted(files), "README.md", "manifest.json"]:
            self._folder.put_file(staged / name, f"{revision}/{name}")
        pointer = {
            "revision": revision,
            "path": self._folder.address(revision),
            "created_at": manifest["created_at"],
        }
        self._folder.put_bytes(json.dumps(pointer).encode(), POINTER)
        return Release(revision, self._folder.address(revision), True, rows)

    def _write_shards(
        self, staged: Path, manifest: Manifest, answers: Answers, always: bool
    ) -> dict[str, list[tuple[Path, int]]]:
        """The partition's shards and their rows by view, from some prompts and their answers at a time."""
        limit = self._profile.release.shard_mb * 1_000_000
        asked = Asked(
            manifest.partition, **self._how_asked(manifest), shows_reasoning=self._renderer.shows_reasoning
        )
        prompts = read_prompts(manifest)
        with ExitStack() as stack:
            views = {
                view: stack.enter_context(
                    Shards(staged / "data" / view, manifest.partition, SCHEMAS[view], limit)
                )
                for view in self._profile.release.views
            }
            while some := list(islice(prompts, _PROMPTS_AT_A_TIME)):
                hashes = {h for prompt in some for chain in prompt.prompt_hashes for h in chain}
                found = self._store.lookup(hashes, answers)
                for prompt in some:
                    for view, shards in views.items():
                        shards.add(rows_of(view, asked, prompt, found))
            return {view: shards.finish(always) for view, shards in views.items()}


def read_back(folder: Path, rows: dict[str, int]) -> None:
    """Load every view with `load_dataset`, in a process of its own, as a user will. Raises ReleaseError."""
    code = (
        "import ctypes, os, signal, sys\n"
        "ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with us\n"
        "if os.getppid() != int(sys.argv[3]): sys.exit(1)\n"
        "import json, tempfile, datasets\n"
        "folder, rows = sys.argv[1], json.loads(sys.argv[2])\n"
        "for view, n in rows.items():\n"
        "    if not n: continue  # load_dataset refuses a split without rows\n"
        "    with tempfile.TemporaryDirectory() as cache:\n"
        "        loaded = datasets.load_dataset(folder, view, split='train', cache_dir=cache)\n"
        "        assert loaded.num_rows == n, f'{view}: {loaded.num_rows} rows instead of {n}'\n"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", code, str(folder), json.dumps(rows), str(os.getpid())],
            capture_output=True,
            text=True,
            timeout=_READ_BACK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError("the staged release could not be loaded back in time") from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ReleaseError(f"the staged release does not load with load_dataset: {last}")


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _fingerprint(files: dict[str, dict[str, Any]]) -> str:
    listed = [(name, about["sha256"]) for name, about in sorted(files.items())]
    return hashlib.sha256(json.dumps([LAYOUT_VERSION, listed]).encode()).hexdigest()
