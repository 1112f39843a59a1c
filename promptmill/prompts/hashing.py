"""What makes two prompts the same request.

A prompt hash covers the input ids, the sampling parameters without `max_new_tokens`, the weights' identity,
the sample and a schema version. It does not cover where the weights lie, addresses, concurrency, server
flags, the order or number of rows, row ids, or the template as such: only what the template rendered.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence

from promptmill.model import Model
from promptmill.settings import SamplingSettings
from promptmill.types import Message

SCHEMA_VERSION = 1


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
        digest = self._common.copy()
        digest.update(sample.to_bytes(4, "little"))
        digest.update(array("I", input_ids).tobytes())
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


def digest_of(parts: Sequence[str]) -> str:
    """A hash of texts in their order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\n")
    return digest.hexdigest()
