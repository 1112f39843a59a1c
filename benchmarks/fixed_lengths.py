"""The simulator, with answers as long as a file says and a clock that can be read; all else is its own.

    python -m benchmarks.fixed_lengths FOLDER [flags of the simulator]

FOLDER/lengths.json maps `digest` of a prompt's input ids to the tokens of its answer; prompts that are not in
it (the gate's) end by chance, as always. FOLDER/busy_s is the simulated time that the server's steps took, a
double in a shared page: a machine that is short of CPU falls behind the clock, not behind this.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptmill.sim import model, server, worker
from promptmill.sim.model import Stream, Vocabulary
from promptmill.sim.request import Finish, Step


@dataclass(slots=True)
class FixedLength(Stream):
    """An answer that stops after so many tokens; they follow from the prompt, at less CPU than usual."""

    tokens: int = 0

    def advance(self) -> Finish | None:
        ordinary = self.vocabulary.ordinary
        self._state = (self._state * 0x9E3779B97F4A7C15 + 1) & 0xFFFFFFFFFFFFFFFF
        self.output_ids.append(ordinary[(self._state >> 32) % len(ordinary)])
        return Finish("stop", matched=0) if len(self.output_ids) >= self.tokens else None


def digest(input_ids: Sequence[int]) -> str:
    return hashlib.blake2b(array("i", input_ids).tobytes(), digest_size=16).hexdigest()


def busy_s(folder: Path) -> float:
    return float(struct.unpack("d", (folder / "busy_s").read_bytes()[:8])[0])


def main() -> int:
    folder, *flags = sys.argv[1:]
    _fix_lengths(json.loads((Path(folder) / "lengths.json").read_text(encoding="utf-8")))
    _show_clock(Path(folder) / "busy_s")
    return server.main(flags)


def _fix_lengths(tokens: dict[str, int]) -> None:
    begin = model.start

    def start(vocabulary: Vocabulary, prompt: Sequence[int], *rest: Any) -> Stream:
        stream = begin(vocabulary, prompt, *rest)
        if (length := tokens.get(digest(prompt))) is None:
            return stream
        fixed = FixedLength(vocabulary, stream.sampling, 0.0, 0.0, stream.decode, tokens=length)
        fixed._state = stream._state
        return fixed

    setattr(worker, "start", start)  # noqa: B010  the module does not export what it imports


def _show_clock(path: Path) -> None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, mmap.PAGESIZE)
    page, wait = mmap.mmap(handle, mmap.PAGESIZE), worker.Worker._wait

    def counted(self: worker.Worker, step: Step) -> None:
        struct.pack_into("d", page, 0, struct.unpack_from("d", page)[0] + step.duration_s)
        wait(self, step)

    worker.Worker._wait = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
