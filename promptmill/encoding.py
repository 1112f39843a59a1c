"""Texts to ids, many at a time: one call of the library encodes them on all cores.

None where a tokenizer's class renders or encodes in a way of its own: then it is asked row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

Encode = Callable[[Sequence[str]], list[list[int]]]
_OWN = ("apply_chat_template", "__call__", "_encode_plus", "set_truncation_and_padding", "backend_tokenizer")


def make_encoder(tokenizer: Any) -> Encode | None:
    """Encodes rendered texts exactly as `apply_chat_template(tokenize=True)` does, or None."""
    if not _is_plain(tokenizer):
        return None
    tokenizer("", add_special_tokens=False)  # takes back what tokenizer.json says of truncation and padding
    backend = tokenizer.backend_tokenizer

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    return encode


def _is_plain(tokenizer: Any) -> bool:
    """Whether the whole way from messages to ids is the library's own."""
    with suppress(ImportError, AttributeError):
        from transformers import PreTrainedTokenizerFast

        own = any(getattr(type(tokenizer), n) is not getattr(PreTrainedTokenizerFast, n) for n in _OWN)
        patched = any(name in vars(tokenizer) for name in _OWN)
        return not own and not patched and not hasattr(tokenizer, "_switch_to_input_mode")
    return False
