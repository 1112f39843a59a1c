"""Which prompt is asked next. Pure: no I/O of its own, no clock, no tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from promptmill.types import Prompt

PRIOR_TOKENS = 2_500.0
"""Of an answer, while nothing is known."""
_PRIOR_WEIGHT = 8.0
"""In answers."""
_AHEAD = 0.25
"""How far the partition with the longest answers may be ahead of one with none: what starts late and takes
long leaves the server half empty at the end."""


@dataclass(slots=True)
class _Queue:
    total: int
    cap: int | None
    length_class: str
    weight: float
    fresh: Iterator[Prompt]
    ahead: deque[Prompt] = field(default_factory=deque)
    """Retries, and next turns of conversations that are under way: before anything fresh."""
    issued: int = 0
    """Requests sent, each once however often it was tried."""
    exhausted: bool = False
    """`fresh` has nothing more."""
    skipped: set[str] = field(default_factory=set)
    """Hashes that another row asks for as well."""


@dataclass(slots=True)
class _Outputs:
    """Of one partition; they outlive its queue."""

    mean: float
    weight: float = _PRIOR_WEIGHT

    def add(self, tokens: int) -> None:
        self.weight += 1
        self.mean += (tokens - self.mean) / self.weight


class Picker:
    """Shares the window out among partitions: the one that is furthest behind goes first.

    Behind is measured as the share of it that was sent, over its weight; those with long answers are kept
    slightly ahead.
    """

    def __init__(self, mean_outputs: Mapping[str, float] | None = None) -> None:
        """`mean_outputs`: what `mean_outputs()` gave at the end of an earlier run."""
        self._queues: dict[str, _Queue] = {}
        self._outputs = {name: _Outputs(mean) for name, mean in (mean_outputs or {}).items()}

    def add(
        self,
        partition: str,
        fresh: Iterable[Prompt],
        total: int,
        length_class: str,
        cap: int | None,
        weight: float = 1.0,
    ) -> None:
        """`total` requests are expected, later turns included; `cap` bounds what its class has in flight.

        `fresh` is read lazily, in its order, from within `pick`.
        """
        self._outputs.setdefault(partition, _Outputs(PRIOR_TOKENS))
        self._queues[partition] = _Queue(max(1, total), cap, length_class, weight, iter(fresh))

    def remove(self, partition: str) -> None:
        self._queues.pop(partition, None)

    def put_ahead(self, prompt: Prompt, *, again: bool = True) -> None:
        """A prompt that was sent and is to be sent `again`, or else the next turn of a conversation.

        One of a partition that has left is dropped: it is pending in the store.
        """
        if queue := self._queues.get(prompt.partition):
            queue.ahead.append(prompt)
            queue.issued -= again

    def sent(self, partition: str) -> None:
        """A request of the partition went out past `pick`: the next turn of a conversation."""
        if queue := self._queues.get(partition):
            queue.issued += 1

    def finished(self, partition: str, output_tokens: int) -> None:
        """An answer of the partition is there; how long it is moves the partition's mean."""
        self._outputs.setdefault(partition, _Outputs(PRIOR_TOKENS)).add(output_tokens)

    def mean_outputs(self) -> dict[str, float]:
        """Output tokens of an answer by partition, to be given to the next run's picker."""
        return {name: outputs.mean for name, outputs in self._outputs.items()}

    def exhausted(self, partition: str) -> bool:
        """Nothing is left to send, whatever is in flight."""
        queue = self._queues[partition]
        return queue.exhausted and not queue.ahead

    def skipped(self, partition: str) -> set[str]:
        """Hashes that were left out because another request has or had them."""
        return self._queues[partition].skipped

    def pick(self, in_flight: Callable[[str], int], skip: Callable[[Prompt], bool]) -> Prompt | None:
        """The next prompt to send, or None where nothing may be sent now.

        It counts as sent: whoever cannot send it gives it back with `put_ahead`. `in_flight` counts a class,
        and may count what was picked and not sent yet; `skip` tells of duplicates, and a prompt that it
        holds for one is not offered again. None does not mean that a partition is exhausted: a class may be
        full. Raises what reading `fresh` raises.
        """
        for queue in self._furthest_behind_first():
            if queue.cap is not None and in_flight(queue.length_class) >= queue.cap:
                continue
            if prompt := _next(queue, skip):
                return prompt
        return None

    def _furthest_behind_first(self) -> list[_Queue]:
        longest = max((self._outputs[name].mean for name in self._queues), default=0.0) or 1.0

        def place(name: str) -> tuple[bool, float]:
            queue = self._queues[name]
            lead = 1 + _AHEAD * self._outputs[name].mean / longest
            return not queue.ahead, queue.issued / queue.total / queue.weight / lead

        return [self._queues[name] for name in sorted(self._queues, key=place)]


def _next(queue: _Queue, skip: Callable[[Prompt], bool]) -> Prompt | None:
    while queue.ahead:
        prompt = queue.ahead.popleft()
        queue.issued += 1
        if not skip(prompt):
            return prompt
        queue.skipped.add(prompt.prompt_hash)
    if queue.exhausted:
        return None
    for prompt in queue.fresh:
        queue.issued += 1
        if not skip(prompt):
            return prompt
        queue.skipped.add(prompt.prompt_hash)
    queue.exhausted = True
    return None
