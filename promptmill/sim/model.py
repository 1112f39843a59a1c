"""The simulated model: the next token is a function of the whole sequence before it.

So a request whose prompt is another's prompt and part of its answer goes on exactly as the other did, at
temperature 0. Lengths are geometric, which is what makes that possible: nothing depends on where the answer
began.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from promptmill.sim.request import Finish

_MASK = (1 << 64) - 1
_FOLD = 0x9E3779B97F4A7C15
_SCALE = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the model may emit. `ordinary` holds neither end tokens nor the markers' first ids."""

    size: int
    ordinary: Sequence[int]
    eos: tuple[int, ...]
    think_open: tuple[int, ...]
    think_close: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What of a request's sampling_params the simulator honours."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    seed: int = 0
    """Mixed in at a temperature above 0."""


@dataclass(slots=True)
class Stream:
    """One answer in the making; the engine calls `advance` for each token."""

    vocabulary: Vocabulary
    sampling: Sampling
    stop_chance: float
    close_chance: float
    decode: Callable[[list[int]], str]
    """Ids to text, for stop strings."""
    output_ids: list[int] = field(default_factory=list)
    reasoning_tokens: int = 0
    _state: int = 0
    _noise: int = 0
    _inside: bool = False
    _tail: tuple[int, ...] = ()

    def advance(self) -> Finish | None:
        token = self._next()
        self.output_ids.append(token)
        self.reasoning_tokens += self._inside
        self._take(token)
        return self._finish(token)

    def _take(self, token: int) -> None:
        self._state = ((self._state ^ token) * _FOLD + 1) & _MASK
        vocabulary = self.vocabulary
        longest = max(len(vocabulary.think_open), len(vocabulary.think_close), 1)
        self._tail = (*self._tail[1 - longest :], token) if longest > 1 else (token,)
        if _ends_with(self._tail, vocabulary.think_open):
            self._inside = True
        elif _ends_with(self._tail, vocabulary.think_close):
            self._inside = False

    def _next(self) -> int:
        vocabulary, sampling = self.vocabulary, self.sampling
        value = _mix(self._state ^ self._noise)
        if self._inside:
            if (rest := _rest_of_marker(self._tail, vocabulary.think_close)) is not None:
                return rest
            if vocabulary.think_close and value / _SCALE < self.close_chance:
                return vocabulary.think_close[0]
        ends_allowed = len(self.output_ids) >= sampling.min_new_tokens
        if not self._inside and ends_allowed and vocabulary.eos and value / _SCALE < self.stop_chance:
            return vocabulary.eos[0]
        index = _mix(value) % len(vocabulary.ordinary)
        token = vocabulary.ordinary[index]
        while not ends_allowed and token in sampling.stop_token_ids:
            index = (index + 1) % len(vocabulary.ordinary)
            token = vocabulary.ordinary[index]
        return token

    def _finish(self, token: int) -> Finish | None:
        sampling = self.sampling
        if not sampling.ignore_eos and (token in sampling.stop_token_ids or token in self.vocabulary.eos):
            return Finish("stop", matched=token)
        if sampling.stop or sampling.stop_regex:
            longest = max((len(text) for text in sampling.stop), default=0)
            window = 4096 if sampling.stop_regex else longest + 8
            tail = self.decode(self.output_ids[-window:])
            for text in sampling.stop:
                if text in tail:
                    return Finish("stop", matched=text)
            for pattern in sampling.stop_regex:
                if found := re.search(pattern, tail):
                    return Finish("stop", matched=found[0])
        return None


def start(
    vocabulary: Vocabulary,
    prompt: Sequence[int],
    sampling: Sampling,
    decode: Callable[[list[int]], str],
    mean_output: float = 200.0,
    mean_reasoning: float = 100.0,
) -> Stream:
    """An answer to `prompt`, before its first token. Means are in tokens."""
    stream = Stream(vocabulary, sampling, 1 / max(1.0, mean_output), 1 / max(1.0, mean_reasoning), decode)
    state = 0
    for token in prompt:
        state = ((state ^ token) * _FOLD + 1) & _MASK
    stream._state = state
    stream._noise = _mix(sampling.seed) if sampling.temperature > 0 else 0
    stream._tail = tuple(prompt[-max(len(vocabulary.think_open), len(vocabulary.think_close), 1) :])
    opened = _last_end(prompt, vocabulary.think_open)
    stream._inside = opened > _last_end(prompt, vocabulary.think_close)
    return stream


def _mix(value: int) -> int:
    """splitmix64's last steps."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _ends_with(tail: Sequence[int], marker: Sequence[int]) -> bool:
    return bool(marker) and tuple(tail[-len(marker) :]) == tuple(marker)


def _rest_of_marker(tail: Sequence[int], marker: Sequence[int]) -> int | None:
    """The next id of a marker that the sequence has begun."""
    for length in range(len(marker) - 1, 0, -1):
        if tuple(tail[-length:]) == tuple(marker[:length]):
            return marker[length]
    return None


def _last_end(ids: Sequence[int], marker: Sequence[int]) -> int:
    """Where the last `marker` in `ids` ends; 0 if there is none."""
    if not marker:
        return 0
    for end in range(len(ids), len(marker) - 1, -1):
        if ids[end - 1] == marker[-1] and tuple(ids[end - len(marker) : end]) == tuple(marker):
            return end
    return 0
