"""`promptmill doctor`: what can be checked before GPU time is spent. Starts and changes nothing."""

from __future__ import annotations

import os
import resource
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from promptmill.errors import PromptmillError
from promptmill.generation.window import LARGEST
from promptmill.model import resolve_model
from promptmill.run import Run, RunRequest, check_places, check_request
from promptmill.serving import command
from promptmill.serving.gpus import gpus
from promptmill.serving.process import choose_port
from promptmill.serving.supervisor import remembered
from promptmill.settings import Profile, mask_command
from promptmill.store.store import Store, journal_path

Level = Literal["ok", "note", "wrong"]
_FILES_BESIDE = 200
_SHARED_MEMORY = Path("/dev/shm")
_MODELS_OWN_KV = ("auto", "bf16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    subject: str
    text: str


def examine(profile: Profile) -> Iterator[Finding]:
    """One finding after another; `wrong` is what would stop a run."""
    checks: list[tuple[str, Callable[[Profile], Iterator[Finding]]]] = [
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
    for subject, look in checks:
        try:
            yield from look(profile)
        except PromptmillError as error:
            yield Finding("wrong", subject, str(error))


def _engine(profile: Profile) -> Iterator[Finding]:
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


def _model(profile: Profile) -> Iterator[Finding]:
    run = Run.read(profile, RunRequest())
    yield Finding("ok", "model", f"{run.model.name}, revision {run.model.revision}, at {run.model.path}")
    renderer = run.renderer
    marks = renderer.markers
    markers = "no reasoning"
    if marks:
        markers = f"reasoning ({marks.family}) opens with {list(marks.open)}, closes with {list(marks.close)}"
    yield Finding("ok", "tokenizer", f"{renderer.vocabulary:,} ids; {markers}")
    room = command.context_tokens(profile, run.model)
    if room:
        yield Finding("ok", "context", f"{room:,} tokens for one prompt and its answer")


def _prompts(profile: Profile) -> Iterator[Finding]:
    check_request(profile, RunRequest())
    yield Finding("ok", "prompts", f"{len(profile.partitions)} sources are there; promptmill plan reads them")


def _command(profile: Profile) -> Iterator[Finding]:
    if profile.server.urls:
        return
    model = resolve_model(profile)
    folder = journal_path(profile).parent / "servers"
    port = profile.server.port or 0
    life = command.Life("NAME", port, "KEY", folder)
    flags = command.server_flags(profile)
    for remedy in remembered(profile, model, folder):
        yield Finding("note", "remedy", f"as in an earlier run: {remedy}")
        if remedy.value is not None and not remedy.flag.startswith("env:"):
            flags[remedy.flag] = remedy.value
    built = command.build_command(profile, model, life, flags, profile.server.env)
    yield Finding("ok", "command", shlex.join(mask_command(built.argv)))
    extra = sorted(set(built.env) - set(os.environ))
    if extra:
        yield Finding("ok", "environment", f"adds {', '.join(extra)}")
    yield Finding("ok", "key", "each life gets a key and a NAME of its own; neither is in argv as a secret")


def _port(profile: Profile) -> Iterator[Finding]:
    if profile.server.urls:
        return
    if profile.server.port:
        choose_port(profile.server.port)
    yield Finding(
        "ok", "port", f"{profile.server.port} is free" if profile.server.port else "a free one is taken"
    )


def _gpus(profile: Profile) -> Iterator[Finding]:
    if profile.server.engine != "sglang" or profile.server.urls:
        return
    found = gpus({**os.environ, **profile.server.env})
    if not found:
        yield Finding("note", "GPUs", "nvidia-smi sees none on this host")
    for gpu in found:
        text = f"{gpu.index}: {gpu.name}, {gpu.used_gib:.1f} of {gpu.total_gib:.1f} GiB in use"
        yield Finding("note" if gpu.busy else "ok", "GPU", text)


def _kv_dtype(profile: Profile) -> Iterator[Finding]:
    dtype = str(command.server_flags(profile).get("kv-cache-dtype", "auto"))
    if profile.server.engine == "sglang" and dtype not in _MODELS_OWN_KV:
        yield Finding(
            "note",
            "KV cache",
            f"{dtype} gives other answers than the model's own type: score some sequences under both before "
            "a release is trained on (fp8 without calibrated scales has cost 20 points on AIME). Every row "
            "records it",
        )


def _places(profile: Profile) -> Iterator[Finding]:
    check_places(profile)
    yield Finding(
        "ok", "places", f"store {profile.store.url} and release {profile.release.url} can be written"
    )
    if holder := Store(profile).lock.holder():
        yield Finding("note", "lock", f"a run is under way: {holder}")


def _host(profile: Profile) -> Iterator[Finding]:
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
