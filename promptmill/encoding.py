"""Texts to ids, many at a time: one call of the library encodes them on all cores, and no piece twice.

None where a tokenizer's class renders or encodes in a way of its own: then it is asked row by row.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

Encode = Callable[[Sequence[str]], list[list[int]]]
_OWN = ("apply_chat_template", "__call__", "_encode_plus", "set_truncation_and_padding", "backend_tokenizer")
_INDEPENDENT = {"Digits", "ByteLevel", "Split", "Sequence"}
"""Pre-tokenizers that take a piece of text as they would take it alone."""
_REMEMBERED_CHARACTERS = 500_000
_LONGEST_REMEMBERED = 50_000


def make_encoder(tokenizer: Any) -> Encode | None:
    """Encodes rendered texts exactly as `apply_chat_template(tokenize=True)` does, or None."""
    if not _is_plain(tokenizer):
        return None
    tokenizer("", add_special_tokens=False)  # takes back what tokenizer.json says of truncation and padding
    backend = tokenizer.backend_tokenizer

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    tokens = _separators(json.loads(backend.to_str()))
    return InPieces(encode, tokens) if tokens else encode


class InPieces:
    """Texts are taken apart at the added tokens, as the library does first, and what lies between is encoded.

    Most of a rendered prompt has been seen before: the template's own words, and a system message with tools
    that stands before thousands of conversations.
    """

    def __init__(self, encode: Encode, tokens: dict[str, int]) -> None:
        """`tokens`: texts of the added tokens, and their ids."""
        self._encode = encode
        self._ids = tokens
        # The library takes the longest of those that begin at one place.
        longest_first = sorted(tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._seen: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._remembering = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        split = [self._split(text) for text in texts]
        known: dict[str, Sequence[int]] = {}
        for pieces in split:
            for piece in pieces[::2]:
                if piece and piece not in known:
                    known[piece] = self._seen.get(piece, ())
        new = [piece for piece, ids in known.items() if not ids]
        known.update(zip(new, self._encode(new), strict=True))
        self._remember(known)
        return [self._joined(pieces, known) for pieces in split]

    def _joined(self, pieces: list[str], known: dict[str, Sequence[int]]) -> list[int]:
        ids: list[int] = []
        for n, piece in enumerate(pieces):
            if n % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += known[piece]
        return ids

    def _remember(self, known: dict[str, Sequence[int]]) -> None:
        """The pieces that were met last, up to some size."""
        with self._remembering:
            for piece, ids in known.items():
                if piece in self._seen:
                    self._seen.move_to_end(piece)
                elif len(piece) <= _LONGEST_REMEMBERED:
                    self._seen[piece] = array("I", ids)
                    self._characters += len(piece)
            while self._characters > _REMEMBERED_CHARACTERS:
                self._characters -= len(self._seen.popitem(last=False)[0])


def _separators(backend: dict[str, Any]) -> dict[str, int]:
    """The added tokens that part a text, of a tokenizer.json; empty where what lies between is not encoded
    alone as it is in its place."""
    added = backend.get("added_tokens") or []
    kinds = {step["type"] for step in _steps(backend.get("pre_tokenizer"))}
    spaced = any(step.get("add_prefix_space") for step in _steps(backend.get("pre_tokenizer")))
    odd = any(token[name] for token in added for name in ("lstrip", "rstrip", "single_word"))
    if backend.get("normalizer") or not kinds or kinds - _INDEPENDENT or spaced or odd:
        return {}
    # Those that are looked for in the text as it stands come first, and take it apart for all others.
    return {token["content"]: int(token["id"]) for token in added if not token["normalized"]}


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if not pre_tokenizer:
        return []
    inner = [step for one in pre_tokenizer.get("pretokenizers", []) for step in _steps(one)]
    return [pre_tokenizer, *inner]


def _is_plain(tokenizer: Any) -> bool:
    """Whether the whole way from messages to ids is the library's own."""
    with suppress(ImportError, AttributeError):
        from transformers import PreTrainedTokenizerFast

        own = any(getattr(type(tokenizer), n) is not getattr(PreTrainedTokenizerFast, n) for n in _OWN)
        patched = any(name in vars(tokenizer) for name in _OWN)
        return not own and not patched and not hasattr(tokenizer, "_switch_to_input_mode")
    return False
