"""Whether a server still answers as its model does. Pure.

A server that is numerically sick goes on answering 200 with random or endless text. Two things tell: a
question that it answered well at the gate, and a jump in the share of answers that are of no use.
"""

from __future__ import annotations

from collections import Counter, deque

_SAME_START = 12
_ALIKE = 0.2
_RECENT = 40
_BASE = 100
_JUMP = 0.6
_CALM = 0.2


def is_alike(reference: str, answer: str) -> bool:
    """Whether two greedy answers to one question may come of one model.

    They need not be equal: rounding depends on what else is in the batch, and they part ways at some token.
    """
    reference, answer = reference.strip(), answer.strip()
    if reference[:_SAME_START] == answer[:_SAME_START]:
        return True
    a, b = _trigrams(reference), _trigrams(answer)
    return 2 * (a & b).total() >= _ALIKE * (a.total() + b.total())


def _trigrams(text: str) -> Counter[str]:
    return Counter(text[i : i + 3] for i in range(max(1, len(text) - 2)))


class Usefulness:
    """Of one server's answers, in their order."""

    def __init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self._before = self._useless_before = 0

    @property
    def useless(self) -> int:
        """Of the last 40 answers."""
        return self._recent.count(False)

    def add(self, useful: bool) -> bool:
        """One more answer; whether most of the last 40 are of no use, and few of all before them were."""
        if len(self._recent) == _RECENT:
            self._before += 1
            self._useless_before += not self._recent[0]
        self._recent.append(useful)
        calm = self._before >= _BASE and self._useless_before <= _CALM * self._before
        return calm and self.useless >= _JUMP * _RECENT

    def accept(self) -> None:
        """The jump is the prompts', not the server's: it is the measure from now on."""
        self._recent.clear()
        self._before = self._useless_before = 0
