"""What makes two prompts the same request.

A prompt hash covers the input ids, the sampling parameters without `max_new_tokens`, the weights' identity,
the sample and a schema version. It does not cover where the weights lie, addresses, concurrency, server
flags, the order or number of rows, row ids, or the template as such: only what the template rendered. For a
server that takes no ids, messages, tools and template arguments stand in their place.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from promptmill.model import Model
from promptmill.settings import SamplingSettings
from promptmill.types import Message

SCHEMA_VERSION = 1
DIGEST = np.dtype("S16")
"""A prompt hash in memory: its first 128 bits. No two of 10^9 prompts share them by chance."""
Digests = npt.NDArray[np.bytes_]

_HEX_DIGITS = 64
_NO_DIGIT = 0xFF
_VALUE_OF = np.full(256, _NO_DIGIT, np.uint8)
_VALUE_OF[np.frombuffer(b"0123456789abcdef", np.uint8)] = range(16)


class PromptHasher:
    """Hashes the prompts of one partition; what they have in common is hashed once."""

    def __init__(self, model: Model, renderer_fingerprint: str, sampling: SamplingSettings) -> None:
        common = {
            "schema": SCHEMA_VERSION,
            "model": model.name,
            "model_revision": model.revision,
            "sampling": sampling.model_dump(exclude_none=True, exclude={"samples"}),
        }
        self._common = hashlib.sha256(json.dumps(common, sort_keys=True).encode())
        self._renderer = renderer_fingerprint

    def __call__(self, input_ids: Sequence[int], sample: int) -> str:
        """The hash of a first turn: 64 hexadecimal digits."""
        ids = input_ids if isinstance(input_ids, array) else array("I", input_ids)
        return self._of(ids.tobytes(), sample)

    def of_messages(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        sample: int,
    ) -> str:
        """The hash of a first turn whose ids only its server knows."""
        asked = json.dumps([list(messages), tools, template_kwargs], sort_keys=True)
        return self._of(b"messages\0" + asked.encode(), sample)

    def _of(self, asked: bytes, sample: int) -> str:
        digest = self._common.copy()
        digest.update(sample.to_bytes(4, "little"))
        digest.update(asked)
        return digest.hexdigest()

    def chain(self, first: str, later_turns: Sequence[Sequence[Message]]) -> list[str]:
        """The hashes of all turns of a conversation, the first one given.

        The ids of a later turn are not known before the turns ahead of it are answered, but they follow
        from that answer (one a hash), from what is said next and from how it is rendered: these are hashed.
        """
        hashes = [first]
        for turn in later_turns:
            said = json.dumps(turn, sort_keys=True)
            hashes.append(digest_of([hashes[-1], self._renderer, said]))
        return hashes


class RunningDigest:
    """A hash of texts in their order, that grows with none of them."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, parts: Iterable[str]) -> None:
        for part in parts:
            self._digest.update(part.encode())
            self._digest.update(b"\n")

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def digest_of(parts: Iterable[str]) -> str:
    """A hash of texts in their order."""
    digest = RunningDigest()
    digest.update(parts)
    return digest.hexdigest()


def digest(prompt_hash: str) -> bytes:
    """A prompt hash as it is kept in memory. Raises ValueError where it is none."""
    if len(prompt_hash) != _HEX_DIGITS:
        raise ValueError(f"{prompt_hash[:80]!r} is no prompt hash")
    return bytes.fromhex(prompt_hash[: 2 * DIGEST.itemsize])


def digests(prompt_hashes: Any) -> Digests:
    """The same of an Arrow array of strings, all at once. Raises ValueError where one is no prompt hash."""
    n, (_, offsets, data) = len(prompt_hashes), prompt_hashes.buffers()
    if not n:
        return np.empty(0, DIGEST)
    ends = np.frombuffer(offsets, np.int32)[prompt_hashes.offset :][: n + 1]
    if prompt_hashes.null_count or (np.diff(ends) != _HEX_DIGITS).any():
        raise ValueError("a prompt hash has not 64 digits")
    text = np.frombuffer(data, np.uint8)[ends[0] : ends[-1]].reshape(n, _HEX_DIGITS)
    values = _VALUE_OF[text[:, : 2 * DIGEST.itemsize]]
    if (values == _NO_DIGIT).any():
        raise ValueError("a prompt hash is not hexadecimal")
    packed = np.ascontiguousarray(values[:, 0::2] << 4 | values[:, 1::2])
    return packed.reshape(-1).view(DIGEST)
