"""Which prompt is asked next. Pure: no I/O of its own, no clock, no tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from promptmill.types import Prompt


@dataclass(slots=True)
class _Queue:
    total: int
    cap: int | None
    length_class: str
    fresh: Iterator[Prompt]
    ahead: deque[Prompt] = field(default_factory=deque)
    """Retries, and next turns of conversations that are under way: before anything fresh."""
    issued: int = 0
    exhausted: bool = False
    """`fresh` has nothing more."""
    skipped: set[str] = field(default_factory=set)
    """Hashes that another row asks for as well."""


class Picker:
    """Shares the window out among partitions: the one that is furthest behind goes first."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}

    def add(
        self, partition: str, fresh: Iterable[Prompt], total: int, length_class: str, cap: int | None
    ) -> None:
        """`total` prompts are expected of `fresh`; `cap` bounds what its class has in flight."""
        self._queues[partition] = _Queue(max(1, total), cap, length_class, iter(fresh))

    def remove(self, partition: str) -> None:
        self._queues.pop(partition, None)

    def put_ahead(self, prompt: Prompt) -> None:
        """A retry or a next turn. One of a partition that has left is dropped: it is pending in the store."""
        if queue := self._queues.get(prompt.partition):
            queue.ahead.append(prompt)

    def exhausted(self, partition: str) -> bool:
        """Nothing is left to send, whatever is in flight."""
        queue = self._queues[partition]
        return queue.exhausted and not queue.ahead

    def skipped(self, partition: str) -> set[str]:
        """Hashes that were left out because another request has or had them."""
        return self._queues[partition].skipped

    def pick(self, in_flight: Callable[[str], int], skip: Callable[[Prompt], bool]) -> Prompt | None:
        """The next prompt to send, or None. `in_flight` counts a class; `skip` tells of duplicates."""
        order = sorted(self._queues.values(), key=lambda q: (not q.ahead, q.issued / q.total))
        for queue in order:
            if queue.cap is not None and in_flight(queue.length_class) >= queue.cap:
                continue
            if prompt := _next(queue, skip):
                return prompt
        return None


def _next(queue: _Queue, skip: Callable[[Prompt], bool]) -> Prompt | None:
    while queue.ahead:
        prompt = queue.ahead.popleft()
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
