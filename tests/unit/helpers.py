"""What several unit tests build."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from promptmill.chat import ChatRenderer
from promptmill.model import Model
from promptmill.prompts.manifest import Preparation
from promptmill.settings import Profile
from promptmill.types import Answer, Message, PromptRow

ROOT = Path(__file__).resolve().parents[2]
DEMO_TEMPLATE = ROOT / "deployments" / "demo" / "chat_template.jinja"
MODEL = Model("some/model", "revision-1", "/weights")


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def make_profile(**changes: Any) -> Profile:
    return Profile(**{"model": "m", "partitions": [{"name": "A", "source": "a.jsonl"}], **changes})


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """JSON lines; a row that is text is written as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def make_preparation(
    source: Path,
    renderer: ChatRenderer,
    partition: dict[str, Any] | None = None,
    *,
    model: Model = MODEL,
    limit: int | None = None,
    context_tokens: int | None = None,
    **profile: Any,
) -> Preparation:
    """Of partition A, whose manifests lie in `manifests` beside the source."""
    table = {"name": "A", "source": str(source), **(partition or {})}
    resolved = make_profile(partitions=[table], **profile)
    return Preparation(
        profile=resolved,
        partition=resolved.partitions[0],
        model=model,
        renderer=renderer,
        folder=source.parent / "manifests",
        limit=limit,
        context_tokens=context_tokens,
    )


def make_row(**changes: Any) -> PromptRow:
    values: dict[str, Any] = {
        "row": 0,
        "id": "q1",
        "location": "a.jsonl:1",
        "turns": [[user("What is 2+2?")]],
        "tools": None,
        "input_ids": [1, 2, 3],
        "prompt_hashes": [["h0"]],
    }
    return PromptRow(**{**values, **changes})


def make_answer(prompt_hash: str = "h0", **changes: Any) -> Answer:
    values: dict[str, Any] = {
        "prompt_hash": prompt_hash,
        "partition": "A",
        "sample": 0,
        "turn": 0,
        "status": "answered",
        "finish_reason": "stop",
        "flags": [],
        "prompt_ids": [1, 2, 3],
        "output_ids": [7, 8],
        "reasoning": "two and two",
        "content": "4",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "reasoning_tokens": 1,
        "resumed_tokens": 0,
        "max_new_tokens": 64,
        "model": "some/model",
        "model_revision": "revision-1",
        "kv_dtype": "auto",
        "server": "life-1",
        "created_at": "2026-01-01T00:00:00+00:00",
    }
    return Answer(**{**values, **changes})


def byte_tokenizer(template: str, special: Sequence[str] = (), plain: Sequence[str] = (), **more: Any) -> Any:
    """A tokenizer of bytes, with added tokens: `special` ones, and `plain` ones that decode as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in plain])
    settings = {"clean_up_tokenization_spaces": False, "chat_template": template, **more}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
