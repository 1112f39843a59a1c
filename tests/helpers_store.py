"""Shared by the tests of store, serving and S3: small real things, made by hand, and bounded waiting."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from promptmill.model import Model
from promptmill.prompts.manifest import Preparation, prepare, read_keys
from promptmill.settings import Profile
from promptmill.types import Answer, Manifest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
MODEL = Model("stub/model", "0" * 40, "stub/model")


def until(condition: Callable[[], T], timeout_s: float, what: str) -> T:
    """Poll, bounded, for what happens in another process; returns the first true value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return value


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def answer(prompt_hash: str, partition: str = "P", **changes: Any) -> Answer:
    """A finished answer; `changes` are fields."""
    fields: dict[str, Any] = {
        "prompt_hash": prompt_hash,
        "partition": partition,
        "sample": 0,
        "turn": 0,
        "status": "answered",
        "finish_reason": "stop",
        "flags": [],
        "prompt_ids": [1, 2, 3],
        "output_ids": [4, 5],
        "reasoning": "because",
        "content": f"the answer to {prompt_hash[:8]}",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "reasoning_tokens": 1,
        "resumed_tokens": 0,
        "max_new_tokens": 64,
        "model": MODEL.name,
        "model_revision": MODEL.revision,
        "kv_dtype": "f16",
        "server": "life-1",
        "created_at": "2026-11-01T00:00:00+00:00",
    }
    return Answer(**{**fields, **changes})


def cut(prompt_hash: str, cap: int, **changes: Any) -> Answer:
    """An answer that ended at its cap."""
    return answer(
        prompt_hash, status="truncated", finish_reason="length", **{"max_new_tokens": cap, **changes}
    )


def failed(prompt_hash: str, **changes: Any) -> Answer:
    return answer(prompt_hash, status="failed", finish_reason="", output_ids=[], **changes)


def make_profile(folder: Path, **sections: Any) -> Profile:
    """A profile whose store and release lie below `folder`; partition P reads folder/P.jsonl."""
    data: dict[str, Any] = {
        "model": MODEL.name,
        "store": {"url": str(folder / "store")},
        "release": {"url": str(folder / "release")},
        "classes": {"short": {"max_new_tokens": 64}},
        "partitions": [{"name": "P", "source": str(folder / "P.jsonl")}],
    }
    return Profile(**{**data, **sections})


class StubRenderer:
    """Renders a message to the bytes of its text; enough for a manifest and a release, with no tokenizer."""

    marker_texts = ("", "")

    def render(self, messages: Sequence[dict[str, Any]], tools: object) -> list[int]:
        return list("\n".join(m["content"] for m in messages).encode())

    def render_many(self, prompts: Sequence[tuple[Sequence[dict[str, Any]], object]]) -> list[list[int]]:
        return [self.render(*prompt) for prompt in prompts]

    def fingerprint(self) -> str:
        return "stub"

    def describe(self) -> dict[str, Any]:
        return {"fingerprint": self.fingerprint()}

    def shows_reasoning(self, messages: object, prompt_ids: object) -> None:
        return None

    def control_tokens(self) -> list[str]:
        return []


def make_manifest(folder: Path, rows: Sequence[Any], **sections: Any) -> Manifest:
    """Partition P prepared from `rows`: a text is a prompt, a list the turns of a conversation, None a
    line that is no JSON."""
    lines = []
    for number, row in enumerate(rows):
        turns = [row] if isinstance(row, str) else row
        lines.append("{" if row is None else json.dumps({"id": f"r{number}", "turns": turns}))
    (folder / "P.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    profile = make_profile(folder, **sections)
    renderer: Any = StubRenderer()
    return prepare(
        Preparation(profile, profile.partition("P"), MODEL, renderer, folder / "manifests", None, None)
    )


def keys_of(manifest: Manifest) -> list[list[list[str]]]:
    """Prompt hashes by row, sample and turn."""
    return list(read_keys(manifest))


def python(code: str, *arguments: str) -> list[str]:
    """The command of a small child that starts at once (no site-packages)."""
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


def start_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """A child that can import promptmill, with pipes to talk to it. The caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(child: subprocess.Popen[str]) -> str:
    """Kill a child of start_python; returns what it wrote to stderr."""
    child.kill()
    return child.communicate(timeout=60)[1]
