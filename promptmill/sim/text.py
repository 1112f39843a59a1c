"""What lies at --model-path: configuration, tokenizer, chat template. All of it may be absent.

Without a tokenizer a text is made of words such as `<17>`, one a token.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import cached_property
from pathlib import Path
from typing import Any

from promptmill.sim.model import Vocabulary

_WORD = re.compile(r"<(\d+)>|\S+")


class ModelFiles:
    """Read lazily; everything has an answer where a file is missing."""

    def __init__(
        self, model_path: str, tokenizer_path: str | None = None, chat_template: str | None = None
    ) -> None:
        self.folder = Path(model_path)
        self.tokenizer_folder = Path(tokenizer_path or model_path)
        self.chat_template = chat_template
        """A file that stands for the tokenizer's own."""
        self.config = _read_json(self.folder / "config.json")
        if isinstance(inner := self.config.get("text_config"), dict):
            self.config = {**inner, **self.config}

    @property
    def has_tokenizer(self) -> bool:
        return (self.tokenizer_folder / "tokenizer.json").is_file()

    @cached_property
    def tokenizer(self) -> Any:
        """A `tokenizers.Tokenizer`: much quicker to load than transformers, and all that text needs."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.tokenizer_folder / "tokenizer.json"))

    @cached_property
    def chat_tokenizer(self) -> Any:
        """transformers' tokenizer, for the chat template; seconds to import."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self.tokenizer_folder))
        if self.chat_template and Path(self.chat_template).is_file():
            tokenizer.chat_template = Path(self.chat_template).read_text(encoding="utf-8")
        return tokenizer

    @cached_property
    def words(self) -> int:
        """Size of the vocabulary without a tokenizer."""
        return 32_000

    def encode(self, text: str, special: bool = True) -> list[int]:
        if self.has_tokenizer:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
            return ids
        return [
            int(word[1]) if word[1] else 3 + zlib.crc32(word[0].encode()) % (self.words - 100)
            for word in _WORD.finditer(text)
        ]

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        if self.has_tokenizer:
            text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special)
            return text
        return "".join(f"<{token}>" for token in ids)

    def vocabulary(self, memory: Any, sim: Any) -> Vocabulary:
        """Ids that the model may emit; flags go before files, and files before the preset."""
        size = sim.sim_vocab or self.config.get("vocab_size") or memory.vocab
        eos = tuple(sim.sim_eos_id or self._eos() or memory.eos)
        think_open = tuple(sim.sim_think_open or self._marker("<think>") or memory.think_open)
        think_close = tuple(sim.sim_think_close or self._marker("</think>") or memory.think_close)
        self.words = size
        kept = {*eos, *think_open[:1], *think_close[:1]}
        if not self.has_tokenizer:
            top = min(size, *eos, *think_open, *think_close) if size > 100 and eos[0] > 100 else size
            first = 3 if top > 3 else 0
            ordinary = [i for i in range(first, max(top, first + 1)) if i not in kept] or [0]
            return Vocabulary(size, ordinary, eos, think_open, think_close)
        size = sim.sim_vocab or self.config.get("vocab_size") or self.tokenizer.get_vocab_size()
        special = set(self.tokenizer.get_added_tokens_decoder())
        plain = [
            token
            for word, token in self.tokenizer.get_vocab().items()
            if token < size and token not in special and token not in kept and word[-1:].isalpha()
            and word.lstrip("Ġ▁").isascii()
        ]  # fmt: skip
        return Vocabulary(size, sorted(plain) or [0], eos, think_open, think_close)

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, kwargs: dict[str, Any]
    ) -> list[int]:
        """Ids of a conversation by the tokenizer's chat template. Raises ValueError where there is none."""
        if not self.has_tokenizer:
            raise ValueError("Cannot use chat template functions because tokenizer.chat_template is not set")
        rendered = self.chat_tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False, **kwargs
        )
        return self.encode(rendered, special=False)

    def _eos(self) -> list[int]:
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.folder / name).get("eos_token_id")
            if value is not None:
                return [value] if isinstance(value, int) else list(value)
        token = _read_json(self.tokenizer_folder / "tokenizer_config.json").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if token and self.has_tokenizer and (known := self.tokenizer.token_to_id(token)) is not None:
            return [known]
        return []

    def _marker(self, text: str) -> list[int]:
        return self.encode(text, special=False) if self.has_tokenizer else []


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return {}
    return value if isinstance(value, dict) else {}


class Detokenizer:
    """Text of a growing list of ids, each token decoded about once."""

    def __init__(self, files: ModelFiles, skip_special: bool) -> None:
        self._files, self._skip = files, skip_special
        self._text, self._prefix, self._read = "", 0, 0

    def text(self, ids: list[int]) -> str:
        """Of all of `ids`, which start with those of the last call; half a character is held back."""
        before = self._files.decode(ids[self._prefix : self._read], self._skip)
        after = self._files.decode(ids[self._prefix :], self._skip)
        if len(after) > len(before) and not after.endswith("\ufffd"):
            self._text += after[len(before) :]
            self._prefix, self._read = self._read, len(ids)
        return self._text

    def whole(self, ids: list[int]) -> str:
        """Of a finished answer, half characters included."""
        return self._files.decode(ids, self._skip)
