"""From settings to the exact command of a server, and what the settings already say about its limits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from promptmill import gguf
from promptmill.errors import ConfigError
from promptmill.model import EMBEDDED_SCHEME, Model
from promptmill.serving import sglang_flags
from promptmill.serving.sglang_flags import Version
from promptmill.settings import FlagValue, Profile, is_secret_name

EMBEDDED_COMMAND = [sys.executable, "-m", "promptmill.serving.embedded"]
_MODULE = ("-m", "sglang.launch_server")
SGLANG_COMMAND = ["python", *_MODULE]
_EMBEDDED_SLOTS = 4
_EMBEDDED_KV_TOKENS = 16384
_ASK_VERSION_S = 30.0


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What is executed. The key does not stand in argv, which `ps` shows."""

    argv: list[str]
    env: dict[str, str]
    files: dict[Path, str] = field(default_factory=dict)
    """To be written before, for the owner's eyes only, and removed when the server is gone."""


@dataclass(frozen=True, slots=True)
class Life:
    """What is particular to one life of a server."""

    name: str
    """It answers to this as its model name, so that no other can be taken for it."""
    port: int
    key: str
    folder: Path
    """For files that it needs."""


def check_engine(profile: Profile) -> None:
    """Raises ConfigError for a combination of engine and settings that cannot work."""
    server = profile.server
    if server.engine == "openai" and not server.urls:
        raise ConfigError("server.engine 'openai' needs the addresses of running servers in server.urls.")
    if server.engine == "sglang" and not profile.model_path and profile.model.startswith(EMBEDDED_SCHEME):
        raise ConfigError(f"model {profile.model!r} is served by server.engine = 'llama_cpp', not by SGLang.")
    if server.api == "chat" and server.engine == "sglang":
        raise ConfigError("server.api 'chat' is for engine 'openai'; SGLang is asked by token ids.")
    if server.replicas > 1:
        raise ConfigError("server.replicas: this version launches one server; give several as server.urls.")
    if server.api_key_env and server.api_key_env not in os.environ:
        raise ConfigError(f"server.api_key_env: the environment variable {server.api_key_env} is not set.")
    if server.restart_command and not server.urls:
        raise ConfigError(
            "server.restart_command is for servers in server.urls; promptmill restarts its own."
        )
    if server.engine == "sglang" and not server.urls:
        _check_sglang(profile)


def _check_sglang(profile: Profile) -> None:
    command = _command(profile)
    version = sglang_version(profile)
    if shutil.which(command[0]) is None:
        problem = "it is not on the path"
        if os.sep in command[0]:
            problem = "it cannot be executed" if Path(command[0]).exists() else "there is no such file"
        raise ConfigError(f"server.command: {command[0]!r}: {problem}.")
    if version is None and tuple(command[1:3]) == _MODULE:
        raise ConfigError(
            f"server.command: {command[0]} has no sglang. SGLang wants an environment of its own; name its "
            'Python: server.command = ["/path/to/venv/bin/python", "-m", "sglang.launch_server"].'
        )
    sglang_flags.for_version(profile.server.flags, version)


def server_flags(profile: Profile) -> dict[str, FlagValue]:
    """The profile's flags under their full names."""
    return {sglang_flags.canonical(flag): value for flag, value in profile.server.flags.items()}


def build_command(
    profile: Profile,
    model: Model,
    life: Life,
    flags: Mapping[str, FlagValue],
    env: Mapping[str, str],
) -> LaunchCommand:
    """The command of one life. `flags` and `env` are the profile's own, or what a remedy made of them."""
    command = [part.replace("{name}", life.name) for part in _command(profile)]
    if profile.server.engine == "sglang":
        config = life.folder / f"{life.name}.yaml"
        argv = [*command, *_render(_sglang_flags(profile, model, life, flags, config))]
        return LaunchCommand(argv, {**os.environ, **env}, {config: f"api-key: {life.key}\n"})
    own: dict[str, FlagValue] = {"model": model.path, "host": "127.0.0.1", "port": life.port}
    own["alias"] = life.name
    if profile.chat.template:
        own["chat-template-file"] = profile.chat.template
    base = {
        **os.environ,
        "GOMP_SPINCOUNT": "0",  # threads that spin starve each other on a busy machine: 2 tokens/s
        "LLAMA_API_KEY": life.key,
    }
    return LaunchCommand([*command, *_render(own), *_render(flags)], {**base, **env})


def secrets(profile: Profile, life: Life) -> list[str]:
    """What the log of this life must not hold: SGLang prints all of its arguments, the key among them."""
    named = [str(v) for k, v in profile.server.flags.items() if is_secret_name(k) and isinstance(v, str)]
    inherited = {**os.environ, **profile.server.env}
    return [life.key, *named, *(v for k, v in inherited.items() if is_secret_name(k) and len(v) >= 8)]


def render_flag(flag: str, value: FlagValue) -> list[str]:
    """One flag of argv; true is the bare flag, false leaves it out, a list is several values."""
    name = "--" + flag.lstrip("-")
    if isinstance(value, bool):
        return [name] if value else []
    values = value if isinstance(value, list) else [value]
    return [name, *(str(v) for v in values)]


def context_tokens(profile: Profile, model: Model) -> int | None:
    """Room for one prompt and its answer, where the settings decide it; None where only the server knows."""
    if profile.server.urls:
        return None
    flags = server_flags(profile)
    if profile.server.engine == "llama_cpp":
        slot = _number(flags, "ctx-size", _EMBEDDED_KV_TOKENS) // _number(flags, "parallel", _EMBEDDED_SLOTS)
        return min(slot, gguf.context_length(model.path) or slot)  # llama.cpp caps a slot at the model's own
    length = _length(flags.get("context-length")) or _configured(model, "max_position_embeddings")
    return length - sglang_flags.KEPT_FREE if length else None


def vocabulary(model: Model, tokenizer_size: int) -> int:
    """Ids that the weights know: one that is not among them kills SGLang's scheduler."""
    return min(tokenizer_size, _configured(model, "vocab_size") or tokenizer_size)


def sglang_version(profile: Profile) -> Version | None:
    """Of the SGLang that would be started; None where it cannot be known beforehand."""
    if profile.server.version:
        return sglang_flags.parse_version(profile.server.version)
    return _ask_version(tuple(_command(profile)))


def _command(profile: Profile) -> list[str]:
    default = SGLANG_COMMAND if profile.server.engine == "sglang" else EMBEDDED_COMMAND
    command = profile.server.command or default
    if command[0] == "promptmill" and shutil.which(command[0]) is None:  # called by its path, not on PATH
        command = [str(Path(sys.executable).with_name("promptmill")), *command[1:]]
    return command


def _sglang_flags(
    profile: Profile, model: Model, life: Life, flags: Mapping[str, FlagValue], config: Path
) -> dict[str, FlagValue]:
    version = sglang_version(profile)
    own: dict[str, FlagValue] = {"model-path": model.path}
    if not Path(model.path).exists():
        own["revision"] = model.revision
    own |= {"host": "127.0.0.1", "port": life.port, "served-model-name": life.name, "config": str(config)}
    own |= {"enable-metrics": True, **sglang_flags.streaming_flags(version, profile.server.stream_interval)}
    if profile.trust_remote_code:
        own["trust-remote-code"] = True
    if profile.chat.template:
        own["chat-template"] = profile.chat.template
    return {**own, **sglang_flags.for_version(flags, version)}


def _render(flags: Mapping[str, FlagValue]) -> list[str]:
    return [part for flag, value in flags.items() for part in render_flag(flag, value)]


@lru_cache(maxsize=8)
def _ask_version(command: Sequence[str]) -> Version | None:
    """Ask the Python that the command runs for its sglang; a container or another host is not asked."""
    program = shutil.which(command[0])
    if program is None:
        return None
    python = [program] if tuple(command[1:3]) == _MODULE else _shebang(Path(program))
    if not python:
        return None
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([*python, "-c", code], capture_output=True, text=True, timeout=_ASK_VERSION_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sglang_flags.parse_version(done.stdout.strip()) if done.returncode == 0 else None


def _shebang(script: Path) -> list[str]:
    """The interpreter of the console script `sglang`; nothing for other programs."""
    if script.name != "sglang":
        return []
    with script.open("rb") as file:
        first = file.readline().decode("utf-8", "replace").strip()
    return first.removeprefix("#!").split() if first.startswith("#!") else []


def _length(value: FlagValue | None) -> int | None:
    """A context length as SGLang writes it: 131072 or 128k."""
    if value is None or isinstance(value, bool):
        return None
    text = str(value).lower()
    factor = 1024 if text.endswith("k") else 1
    if not text.removesuffix("k").isdigit():
        raise ConfigError(f"server.flags.context-length: a number, or 32k, is wanted, not {value!r}.")
    return int(text.removesuffix("k")) * factor


def _configured(model: Model, name: str) -> int | None:
    """A number from the model's config.json, where that lies here; multimodal models nest it."""
    try:
        config = json.loads((Path(model.path) / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    value = config.get(name) or (config.get("text_config") or {}).get(name)
    return value if isinstance(value, int) else None


def _number(flags: Mapping[str, FlagValue], name: str, default: int) -> int:
    value = flags.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"server.flags.{name}: a whole number above 0 is wanted, not {value!r}.")
    return value
