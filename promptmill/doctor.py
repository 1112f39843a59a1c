"""`promptmill doctor`: what can be checked before GPU time is spent.

It starts nothing, and leaves nothing: a probe object is written to where the run will write, and deleted.
"""

from __future__ import annotations

import os
import resource
import shlex
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from promptmill.errors import ConfigError, PromptmillError
from promptmill.generation.window import LARGEST
from promptmill.model import Model, resolve_model
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest, check_rendered, check_source
from promptmill.serving import command
from promptmill.serving.gpus import gpus
from promptmill.serving.process import choose_port
from promptmill.serving.supervisor import remembered
from promptmill.settings import Profile, mask_command, mask_url
from promptmill.store.objects import LocalFolder, open_folder
from promptmill.store.store import Store, check_disk, journal_path

Level = Literal["ok", "note", "wrong"]
_FILES_BESIDE = 200
_FIRST_ROWS = 200
"""Read of a source that is not prepared yet."""
_SHARED_MEMORY = Path("/dev/shm")
_MODELS_OWN_KV = ("auto", "bf16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str


class _Case:
    """A profile, and what several checks want of it."""

    def __init__(self, profile: Profile, scratch: Path) -> None:
        self.profile = profile
        self.scratch = scratch

    @cached_property
    def run(self) -> Run:
        """Raises ConfigError where there is no model or no tokenizer of it."""
        known = Store(self.profile).manifests
        return Run.read(self.profile, RunRequest(), known if known.is_dir() else self.scratch)


Check = Callable[[_Case], Iterator[Finding]]


def examine(profile: Profile) -> Iterator[Finding]:
    """One finding after another; `wrong` is what would stop a run."""
    checks: list[tuple[str, Check]] = [
        ("engine", _engine),
        ("model", _model),
        ("prompts", _prompts),
        ("command", _command),
        ("port", _port),
        ("GPUs", _gpus),
        ("KV cache", _kv_dtype),
        ("places", _places),
        ("host", _host),
    ]
    with _leaving_no_folders(profile), tempfile.TemporaryDirectory() as scratch:
        case = _Case(profile, Path(scratch))
        for subject, look in checks:
            try:
                yield from look(case)
            except PromptmillError as error:
                yield Finding("wrong", subject, str(error))


@contextmanager
def _leaving_no_folders(profile: Profile) -> Iterator[None]:
    """Folders of the run that were not there are removed again, if they are empty."""
    places = [profile.store.url, profile.release.url]
    with suppress(ConfigError):  # an address of an unknown kind, which is said below
        places.append(str(journal_path(profile).parent))
    local = [Path(place) for place in places if "://" not in place]
    missing = {folder for path in local for folder in (path, *path.parents) if not folder.exists()}
    try:
        yield
    finally:
        for folder in sorted(missing, key=lambda folder: len(folder.parts), reverse=True):
            with suppress(OSError):
                folder.rmdir()


def _engine(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    command.check_engine(profile)
    if profile.server.urls:
        yield Finding(
            "ok", "engine", f"{profile.server.engine} at {', '.join(profile.masked()['server']['urls'])}"
        )
        return
    text = str(profile.server.engine)
    if profile.server.engine == "sglang":
        version = command.sglang_version(profile)
        text += f" {'.'.join(map(str, version))}" if version else " of a version that is not known beforehand"
    yield Finding("ok", "engine", text)


def _model(case: _Case) -> Iterator[Finding]:
    run = case.run
    yield Finding("ok", "model", f"{run.model.name}, revision {run.model.revision}, at {run.model.path}")
    renderer = run.renderer
    marks = renderer.markers
    markers = "no reasoning"
    if marks:
        markers = f"reasoning ({marks.family}) opens with {list(marks.open)}, closes with {list(marks.close)}"
    yield Finding("ok", "tokenizer", f"{renderer.vocabulary:,} ids; {markers}")
    if room := command.context_tokens(case.profile, run.model):
        yield Finding("ok", "context", f"{room:,} tokens for one prompt and its answer")


def _prompts(case: _Case) -> Iterator[Finding]:
    """Each source: that it is there, and whether its rows, or the first of them, can be asked."""
    for part in case.profile.partitions:
        try:
            check_source(part)
            yield _rows(case, part.name)
        except PromptmillError as error:
            yield Finding("wrong", "prompts", str(error))


def _rows(case: _Case, partition: str) -> Finding:
    try:
        run = case.run
    except PromptmillError:  # said of the model
        return Finding(
            "note", "prompts", f"{partition}: the source is there; without a model no row is rendered"
        )
    first = ""
    manifest = run.prepared(partition)
    if manifest is None:
        wanted = replace(run.preparation(partition), folder=case.scratch, limit=_FIRST_ROWS)
        manifest = prepare(wanted)
        first = f"the first {_FIRST_ROWS:,}: " if manifest.rows == _FIRST_ROWS else ""
    check_rendered(manifest, case.profile.run.max_unrendered)
    text = f"{partition}: {first}{manifest.prompts:,} of {manifest.rows:,} rows can be asked"
    if manifest.prompts:
        text += (
            f", the longest with {manifest.longest_prompt:,} tokens + {manifest.max_new_tokens:,} to answer"
        )
    if manifest.rejected:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in manifest.rejected.items())
        text += f"; {reasons}, e.g. {manifest.examples[0]}"
    return Finding("ok" if manifest.prompts and not manifest.rejected else "note", "prompts", text)


def _command(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    if profile.server.urls:
        return
    folder = journal_path(profile).parent / "servers"
    port = profile.server.port or 0
    life = command.Life("NAME", port, "KEY", folder)
    flags = command.server_flags(profile)
    try:
        model = resolve_model(profile)
        remedies = remembered(profile, model, folder)
    except ConfigError:  # said of the model; the command can be shown all the same
        model, remedies = (
            Model(profile.model, profile.model_revision, profile.model_path or profile.model),
            [],
        )
    for remedy in remedies:
        yield Finding("note", "remedy", f"as in an earlier run: {remedy}")
        if remedy.value is not None and not remedy.flag.startswith("env:"):
            flags[remedy.flag] = remedy.value
    built = command.build_command(profile, model, life, flags, profile.server.env)
    yield Finding("ok", "command", shlex.join(mask_command(built.argv)))
    extra = sorted(set(built.env) - set(os.environ))
    if extra:
        yield Finding("ok", "environment", f"adds {', '.join(extra)}")
    yield Finding("ok", "key", "each life gets a key and a NAME of its own; neither is in argv as a secret")


def _port(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    if profile.server.urls:
        return
    if profile.server.port:
        choose_port(profile.server.port)
    yield Finding(
        "ok", "port", f"{profile.server.port} is free" if profile.server.port else "a free one is taken"
    )


def _gpus(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    if profile.server.engine != "sglang" or profile.server.urls:
        return
    found = gpus({**os.environ, **profile.server.env})
    if not found:
        yield Finding("note", "GPUs", "nvidia-smi sees none on this host")
    for gpu in found:
        text = f"{gpu.index}: {gpu.name}, {gpu.used_gib:.1f} of {gpu.total_gib:.1f} GiB in use"
        yield Finding("note" if gpu.busy else "ok", "GPU", text)


def _kv_dtype(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    dtype = str(command.server_flags(profile).get("kv-cache-dtype", "auto"))
    if profile.server.engine == "sglang" and dtype not in _MODELS_OWN_KV:
        yield Finding(
            "note",
            "KV cache",
            f"{dtype} gives other answers than the model's own type: score some sequences under both before "
            "a release is trained on (fp8 without calibrated scales has cost 20 points on AIME). Every row "
            "records it",
        )


def _places(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    urls = {"store": profile.store.url, "release": profile.release.url}
    if any(url.startswith("s3://") for url in urls.values()):
        named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
        endpoint = next((os.environ[name] for name in named if os.environ.get(name)), "Amazon's own")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "not set"
        yield Finding("ok", "S3", f"endpoint: {mask_url(endpoint)}; region: {region}")
    for name, url in urls.items():
        try:
            folder = open_folder(url)
            if isinstance(folder, LocalFolder):
                check_disk([folder.path], profile.run.min_free_gib)
            folder.probe()
            yield Finding("ok", name, f"{url}: an object was written, read, listed and deleted")
        except PromptmillError as error:
            yield Finding("wrong", name, str(error))
    check_disk([journal_path(profile).parent], profile.run.min_free_gib)
    if holder := Store(profile).lock.holder():
        yield Finding("note", "lock", f"a run is under way: {holder}")


def _host(case: _Case) -> Iterator[Finding]:
    profile = case.profile
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a run raises its soft limit to this
    wanted = (profile.server.max_in_flight or LARGEST) * max(1, len(profile.server.urls)) + _FILES_BESIDE
    if 0 <= most < wanted:
        raise_it = f"raise it to {wanted} (ulimit -Hn)"
        yield Finding(
            "wrong", "descriptors", f"{most} files may be open, this run wants {wanted}: {raise_it}"
        )
    else:
        yield Finding("ok", "descriptors", "enough files may be open")
    if proxies := urllib.request.getproxies():
        yield Finding("ok", "proxies", f"{', '.join(sorted(proxies))} set; not used towards model servers")
    if _SHARED_MEMORY.exists() and profile.server.engine == "sglang" and not profile.server.urls:
        free = os.statvfs(_SHARED_MEMORY).f_bavail * os.statvfs(_SHARED_MEMORY).f_frsize / 2**30
        yield Finding("ok" if free >= 1 else "note", "shared memory", f"/dev/shm has {free:.1f} GiB free")
