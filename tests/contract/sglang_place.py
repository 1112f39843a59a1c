"""One suite, two servers: our simulator, and the real SGLang on the CPU where SGLANG_UNDER_TEST=real.

`make test-sglang` builds the real one's environment and sets the variable.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from promptmill.chat import ChatRenderer
from promptmill.gguf import rebuild_tokenizer
from promptmill.model import load_tokenizer, resolve_model
from promptmill.profile import load_profile
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.serving.supervisor import Supervisor
from promptmill.settings import Profile

ROOT = Path(__file__).resolve().parents[2]
REAL = os.environ.get("SGLANG_UNDER_TEST") == "real"
START_S = 300.0
SIM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
PROFILE = """
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
model_path = "{model}"
[server]
engine = "sglang"
version = "0.5.23"
command = {command}
startup_timeout_s = {start_s}
poll_interval_s = 1.0
inactivity_timeout_s = 120.0
gpu_wait_s = 0
[server.env]
{env}
[server.flags]
{flags}
[chat]
template = "{root}/deployments/demo/chat_template.jinja"
[sampling]
temperature = 0.0
[classes.short]
max_new_tokens = 64
[store]
url = "{folder}/store"
[release]
url = "{folder}/release"
[[partitions]]
name = "A_text"
source = "{folder}/a.jsonl"
"""


@dataclass
class Engine:
    """What is started, and with what."""

    command: list[str]
    model: Path
    env: dict[str, str] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)

    def write_profile(self, folder: Path, **flags: Any) -> Path:
        """profile.toml in `folder`; a flag that is None is left out."""
        wanted = {name: value for name, value in {**self.flags, **flags}.items() if value is not None}
        path = folder / "profile.toml"
        text = PROFILE.format(
            model=self.model,
            command=json.dumps(self.command),
            start_s=START_S,
            env="".join(f"{name} = {json.dumps(value)}\n" for name, value in self.env.items()),
            flags="".join(f'"{name}" = {json.dumps(value)}\n' for name, value in wanted.items()),
            root=ROOT,
            folder=folder,
        )
        path.write_text(text, encoding="utf-8")
        if not (folder / "a.jsonl").exists():
            (folder / "a.jsonl").write_text('{"prompt": "What is rain?"}\n', encoding="utf-8")
        return path


def find_engine(folder: Path, real_text: bool = False) -> Engine | None:
    """The server under test; None where the real one was asked for and is not built.

    The real one has a small random model, or, for text that means something, SmolLM2.
    """
    if not REAL:
        return Engine([sys.executable, "-m", "promptmill.sim"], sim_model(folder), flags=_SIM_FLAGS)
    from tests.sglang_cpu.environment import find

    built = find()
    if built is None:
        return None
    if real_text:
        return Engine(built.command, built.smollm2, built.env, built.flags)
    return Engine(built.command, built.tiny, built.env, {**built.flags, **built.tiny_flags})


_SIM_FLAGS = {
    "device": "cpu",
    "max-total-tokens": 8192,
    "mem-fraction-static": 0.1,
    "sim-speed": 3,
    "sim-mean-output": 5000,
}


def sim_model(folder: Path) -> Path:
    """The tokenizer and the limits of SmolLM2, without its weights."""
    profile = Profile(model="embedded:smollm2", partitions=[{"name": "A", "source": "a"}])
    rebuilt = rebuild_tokenizer(Path(resolve_model(profile).path), folder / "tokenizer")
    model = folder / "model"
    shutil.copytree(rebuilt, model)
    (model / "config.json").write_text(json.dumps(SIM_MODEL), encoding="utf-8")
    return model


@dataclass
class Running:
    """A server that passed the gate, and who looks after it."""

    profile: Profile
    supervisor: Supervisor
    server: Server
    facts: Facts
    renderer: ChatRenderer

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.server.api_key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, trust_env=False, timeout=120)

    def ids(self, text: str) -> list[int]:
        return self.renderer.render([{"role": "user", "content": text}], None)

    @property
    def log(self) -> str:
        assert self.server.process is not None
        return self.server.process.log.read_text(encoding="utf-8", errors="replace")


def make_supervisor(path: Path, *overrides: str) -> tuple[Profile, Supervisor, ChatRenderer]:
    profile = load_profile(str(path), list(overrides))
    model = resolve_model(profile)
    renderer = ChatRenderer(load_tokenizer(profile, model, path.parent), profile.chat)
    return profile, Supervisor(profile, model, renderer, path.parent / "servers"), renderer


@contextmanager
def running(path: Path, *overrides: str) -> Iterator[Running]:
    """Launch, and let it through the gate; ended with everything that it started."""
    profile, supervisor, renderer = make_supervisor(path, *overrides)
    try:
        (server,) = supervisor.launch()
        facts = supervisor.pass_gate(server, 128)
        yield Running(profile, supervisor, server, facts, renderer)
    finally:
        supervisor.stop_all()
