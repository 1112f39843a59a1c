"""Ids to text. For byte-level BPE a table of each id's bytes does it in a sixth of the tokenizer's time.

The tokenizer itself decodes wherever it is not certain that the table gives the same: where its class decodes
in a way of its own, where something is cleaned up afterwards, and for any other decoder than ByteLevel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_PROBE = "The 3 quick\n\n  brown föxes’ 🦊<|x|>\t\r\n\x00ÿĠ don't . , !"


class Decoder:
    """Decodes without special tokens, by the tokenizer itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def is_whole(self, ids: Sequence[int]) -> bool:
        """Whether no character is cut: U+FFFD stands for the pieces of one, and may be the model's own."""
        return not self(ids).endswith("\ufffd")  # all that text can tell; a cut is mostly at the end


class _TableDecoder(Decoder):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._table = _Table(tokenizer.backend_tokenizer)

    def __call__(self, ids: Sequence[int]) -> str:
        table = self._table
        return b"".join([table[i] for i in ids]).decode("utf-8", "replace")

    def is_whole(self, ids: Sequence[int]) -> bool:
        try:
            b"".join([self._table[i] for i in ids]).decode("utf-8")
        except UnicodeDecodeError:
            return False
        return True


def make_decoder(tokenizer: Any) -> Decoder:
    """By the table where it is certain to give the tokenizer's own text."""
    by_tokenizer = Decoder(tokenizer)
    if not _is_plain(tokenizer):
        return by_tokenizer
    by_table = _TableDecoder(tokenizer)
    probe = [*tokenizer(_PROBE)["input_ids"], *tokenizer.added_tokens_decoder]
    probes = (probe, probe[1::2], probe[::-1])  # characters cut in two as well
    return by_table if all(by_table(ids) == by_tokenizer(ids) for ids in probes) else by_tokenizer


class _Table(dict[int, bytes]):
    """The bytes that each id stands for, looked up when it first occurs."""

    def __init__(self, backend: Any) -> None:
        self._id_to_token = backend.id_to_token
        self._special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id)  # raises what the tokenizer raises for what can be no id
        if token is None or token in self._special:
            value = b""
        else:
            try:
                value = bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, which stands as it is
                value = token.encode()
        self[token_id] = value
        return value


def _is_plain(tokenizer: Any) -> bool:
    """Whether its decoding is the library's own, and all that it does is to join bytes."""
    with suppress(ImportError, AttributeError):
        from tokenizers.decoders import ByteLevel
        from transformers import PreTrainedTokenizerFast

        names = ("decode", "_decode", "backend_tokenizer")
        own = any(getattr(type(tokenizer), n) is not getattr(PreTrainedTokenizerFast, n) for n in names)
        patched = any(name in vars(tokenizer) for name in names)
        plain = type(tokenizer.backend_tokenizer.decoder) is ByteLevel
        return plain and not own and not patched and tokenizer.clean_up_tokenization_spaces is False
    return False


def _characters() -> dict[str, int]:
    """How byte-level BPE writes bytes: the printable ones as themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF = _characters()
