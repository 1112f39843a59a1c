"""From settings to the exact command of a server, and what the settings already say about its limits."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from promptmill.errors import ConfigError
from promptmill.model import Model
from promptmill.settings import FlagValue, Profile

EMBEDDED_COMMAND = [sys.executable, "-m", "promptmill.serving.embedded"]
_EMBEDDED_SLOTS = 4
_EMBEDDED_KV_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What is executed. The key is in the environment and never in argv, which `ps` shows."""

    argv: list[str]
    env: dict[str, str]


def check_engine(profile: Profile) -> None:
    """Raises ConfigError for a combination of engine and settings that cannot work."""
    server = profile.server
    if server.engine == "sglang":
        raise ConfigError(
            "server.engine 'sglang': SGLang's native interface is not part of this version; use 'llama_cpp' "
            "(embedded), or 'openai' with the addresses of running servers in server.urls."
        )
    if server.engine == "openai" and not server.urls:
        raise ConfigError("server.engine 'openai' needs the addresses of running servers in server.urls.")
    if server.replicas > 1:
        raise ConfigError("server.replicas: this version launches one server; give several as server.urls.")
    if server.api_key_env and server.api_key_env not in os.environ:
        raise ConfigError(f"server.api_key_env: the environment variable {server.api_key_env} is not set.")


def build_command(profile: Profile, model: Model, name: str, port: int, key: str) -> LaunchCommand:
    """The command of one life of the embedded engine; `name` is the model name it will answer to."""
    argv = [*(profile.server.command or EMBEDDED_COMMAND)]
    argv += ["--model", model.path, "--host", "127.0.0.1", "--port", str(port), "--alias", name]
    if profile.chat.template:
        argv += ["--chat-template-file", profile.chat.template]
    for flag, value in profile.server.flags.items():
        argv += render_flag(flag, value)
    env = {
        **os.environ,
        "GOMP_SPINCOUNT": "0",  # threads that spin starve each other on a busy machine: 2 tokens/s
        "LLAMA_API_KEY": key,
        **profile.server.env,
    }
    return LaunchCommand(argv, env)


def render_flag(flag: str, value: FlagValue) -> list[str]:
    """One flag of argv; true is the bare flag, false leaves it out, a list is several values."""
    name = "--" + flag.lstrip("-")
    if isinstance(value, bool):
        return [name] if value else []
    values = value if isinstance(value, list) else [value]
    return [name, *(str(v) for v in values)]


def context_tokens(profile: Profile) -> int | None:
    """Room for one prompt and its answer, where the settings decide it; None where only the server knows."""
    if profile.server.engine != "llama_cpp" or profile.server.urls:
        return None
    flags = {flag.lstrip("-"): value for flag, value in profile.server.flags.items()}
    return _number(flags, "ctx-size", _EMBEDDED_KV_TOKENS) // _number(flags, "parallel", _EMBEDDED_SLOTS)


def _number(flags: dict[str, FlagValue], name: str, default: int) -> int:
    value = flags.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"server.flags.{name}: a whole number above 0 is wanted, not {value!r}.")
    return value
