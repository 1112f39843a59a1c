"""JSON as it stands: no type is inferred, no number loses digits, and text can be encoded again.

orjson reads it, and what orjson refuses (lone surrogates, NaN) or rounds (integers over 64 bits) the standard
library. A lone surrogate becomes U+FFFD: it could not be encoded later, far from where it came in.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

_LONG = re.compile(r"\d{20}")
_LONG_BYTES = re.compile(rb"\d{20}")


def loads(data: bytes | str) -> Any:
    """What JSON says, fit to be encoded again. Raises ValueError."""
    return parse(data)[0]


def parse(data: bytes | str) -> tuple[Any, bool]:
    """The same, and whether a lone surrogate in it was replaced."""
    long = _LONG.search(data) if isinstance(data, str) else _LONG_BYTES.search(data)
    if not long:
        try:
            return orjson.loads(data), False
        except orjson.JSONDecodeError:
            pass
    try:
        return clean(json.loads(data))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """As text. Raises TypeError for what JSON has no form of."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # nested over 254 levels, or an integer over 64 bits: json writes both
        return json.dumps(value, ensure_ascii=False)


def clean(value: Any) -> tuple[Any, bool]:
    """`value` with U+FFFD for each lone surrogate, and whether there was one."""
    found = False

    def walk(item: Any) -> Any:
        nonlocal found
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError:
                found = True
                return item.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            return item
        if isinstance(item, list):
            return [walk(one) for one in item]
        if isinstance(item, dict):
            return {walk(key): walk(one) for key, one in item.items()}
        return item

    return walk(value), found
