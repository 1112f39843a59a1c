"""Fixtures of the unit tests; plain builders are in helpers.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import DEMO_TEMPLATE, make_profile

from promptmill.chat import ChatRenderer
from promptmill.model import load_tokenizer, resolve_model
from promptmill.settings import ChatSettings


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2's own, rebuilt from its GGUF file."""
    profile = make_profile(model="embedded:smollm2")
    return load_tokenizer(profile, resolve_model(profile), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> ChatRenderer:
    """With the demo's template, which shows tools and opens <think>."""
    return ChatRenderer(tokenizer, ChatSettings(template=str(DEMO_TEMPLATE)))


@pytest.fixture
def renderer_of(tokenizer: Any, tmp_path: Path) -> Callable[[str], ChatRenderer]:
    """A renderer for a template given as text."""

    def make(template: str) -> ChatRenderer:
        path = tmp_path / "template.jinja"
        path.write_text(template, encoding="utf-8")
        return ChatRenderer(tokenizer, ChatSettings(template=str(path)))

    return make
