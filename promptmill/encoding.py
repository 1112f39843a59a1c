"""Texts to ids, many at a time: one call of the library encodes them on all cores, and no piece twice.

None where a tokenizer's class renders or encodes in a way of its own: then it is asked row by row.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from contextlib import suppress
from typing import Any

Ids = MutableSequence[int]
Encode = Callable[[Sequence[str]], Sequence[Ids]]
_OWN = ("apply_chat_template", "__call__", "_encode_plus", "set_truncation_and_padding", "backend_tokenizer")
_INDEPENDENT = {"Digits", "ByteLevel", "Split", "Sequence"}
"""Pre-tokenizers that take a piece of text as they would take it alone."""
_GPT_2 = "ByteLevel's own"
_CASES, _SPACES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _SIGNS = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+"
_APART = {
    (_GPT_2,),
    # Llama 3, GLM-4.5
    (rf"{_CASES}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}",),
    # Qwen2, Qwen3; Qwen3.5
    (rf"{_CASES}|{_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}",),
    (rf"{_CASES}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    # gpt-oss
    (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CASES}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CASES}?"
        rf"|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}",
    ),
    # DeepSeek-V3
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
}
"""Patterns of pre-tokenizers, applied one after the other, that part before a space behind something else."""

Words = Callable[[str], list[str]]
_words: Words = re.compile(r"\s*\S+(?:[^\S ]\s*\S+)*(?:[^\S ]\s*\Z)?|\s+").findall
_WHOLE = 1_000
"""Characters. Longer pieces are code as often as not, and most of their words are met once."""
_REMEMBERED = 2_000_000
"""Characters of pieces, and some for each piece itself."""
_A_PIECE_MORE = 30


def make_encoder(tokenizer: Any) -> Encode | None:
    """Encodes rendered texts exactly as `apply_chat_template(tokenize=True)` does, or None."""
    if not _is_plain(tokenizer):
        return None
    tokenizer("", add_special_tokens=False)  # takes back what tokenizer.json says of truncation and padding
    backend = tokenizer.backend_tokenizer

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    described = json.loads(backend.to_str())
    if not (tokens := _separators(described)):
        return encode
    return InPieces(encode, tokens, split_words if _splits_words(described) else None)


class InPieces:
    """Texts are taken apart at the added tokens, as the library does first, and short ones into words.

    Most pieces have been met before: the template's own words, a system message with tools that stands before
    thousands of conversations, and the words of a language. Looking one up takes a tenth of encoding it.
    """

    def __init__(self, encode: Encode, tokens: dict[str, int], words: Words | None) -> None:
        """`tokens`: texts of the added tokens, and their ids. `words`: takes apart what lies between."""
        self._encode = encode
        self._tokens = {token: _packed([id_]) for token, id_ in tokens.items()}
        # The library takes the longest of those that begin at one place.
        longest_first = sorted(tokens, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._words = words
        self._forget()

    def __call__(self, texts: Sequence[str]) -> list[array[int]]:
        in_words: dict[str, list[str]] = {}
        taken_apart = [self._pieces(text, in_words) for text in texts]
        if self._size > _REMEMBERED:
            self._forget()
        seen = self._seen  # other threads may forget: each keeps what it has begun with
        found = [_joined(seen, pieces) for pieces in taken_apart]
        self._learn(seen, [p for p, ids in zip(taken_apart, found, strict=True) if ids is None])
        return [ids or _joined(seen, p) or array("I") for p, ids in zip(taken_apart, found, strict=True)]

    def _learn(self, seen: dict[str, bytes], texts: Iterable[list[str]]) -> None:
        new = list(set().union(*texts).difference(seen))
        seen.update(zip(new, map(_packed, self._encode(new)), strict=True))
        self._size += sum(map(len, new)) + _A_PIECE_MORE * len(new)

    def _pieces(self, text: str, in_words: dict[str, list[str]]) -> list[str]:
        pieces: list[str] = []
        for n, piece in enumerate(self._split(text)):
            if n % 2 or not self._words or len(piece) > _WHOLE:
                pieces.append(piece)
            elif piece in in_words:
                pieces += in_words[piece]
            else:
                in_words[piece] = words = self._words(piece)
                pieces += words
        return pieces

    def _forget(self) -> None:
        self._seen = {"": b"", **self._tokens}
        self._size = 0


def split_words(text: str) -> list[str]:
    """Cuts a text before each space that follows what is no white space (of Python, which knows of more)."""
    # Where all white space is single spaces, the same is had four times as quickly.
    if "  " not in text and text.isprintable():
        return text.replace(" ", "\n ").split("\n")
    return _words(text)


def _joined(seen: dict[str, bytes], pieces: list[str]) -> array[int] | None:
    """The ids of pieces; None where one of them was not met before."""
    try:
        return array("I", b"".join(map(seen.__getitem__, pieces)))
    except KeyError:
        return None


def _packed(ids: Ids) -> bytes:
    """Ids as they are joined quickly: four bytes each."""
    return array("I", ids).tobytes()


def _splits_words(backend: dict[str, Any]) -> bool:
    """Whether a space behind something else always begins a token, whatever stands around the two."""
    steps = [step for step in _steps(backend["pre_tokenizer"]) if step["type"] != "Sequence"]
    patterns = [_pattern(step) for step in steps if step["type"] != "Digits"]
    return tuple(filter(None, patterns)) in _APART and not any(
        re.search(r"\S ", token["content"]) for token in backend["added_tokens"] if token["normalized"]
    )


def _pattern(step: dict[str, Any]) -> str:
    """What a pre-tokenizer cuts at; empty: it cuts nowhere; a question mark: that is not known."""
    if step["type"] == "ByteLevel":
        return _GPT_2 if step["use_regex"] else ""
    isolated = step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]
    return str(step["pattern"].get("Regex", "?")) if isolated else "?"


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
