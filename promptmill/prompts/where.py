"""Conditions on columns. A column's type is what the file says; a condition says how it is to be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from promptmill.errors import PromptRejected
from promptmill.settings import FilterSettings


def check(data: Mapping[str, Any], filters: Iterable[FilterSettings]) -> None:
    """Raises PromptRejected for a row that one of them leaves out, or that cannot be judged."""
    for wanted in filters:
        value = data.get(wanted.column)
        if wanted.one_of and (not isinstance(value, str | int) or str(value) not in wanted.one_of):
            raise PromptRejected("filtered_out", f"{wanted.column} is {str(value)[:80]!r}")
        if wanted.at_least is None and wanted.at_most is None:
            continue
        number = _number(value, wanted.column)
        if not (_or(wanted.at_least, -math.inf) <= number <= _or(wanted.at_most, math.inf)):
            raise PromptRejected("filtered_out", f"{wanted.column} is {number:g}")


def _number(value: Any, column: str) -> float:
    try:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            number = float(value)
            if not math.isnan(number):
                return number
    except (ValueError, OverflowError):
        pass
    raise PromptRejected("not_a_number", f"{column} is {str(value)[:80]!r}, and is compared with a number")


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
