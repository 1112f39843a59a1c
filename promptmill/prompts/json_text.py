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
    """`value`, changed in place, with U+FFFD for each lone surrogate; and whether there was one."""
    found = False

    def text(item: str) -> str:
        nonlocal found
        try:
            item.encode()
        except UnicodeEncodeError:
            found = True
            return item.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return item

    whole = [value]
    left: list[Any] = [whole]  # no recursion: what was parsed may be nested as deeply as Python calls
    while left:
        some = left.pop()
        if isinstance(some, dict):
            members = [(text(key), item) for key, item in some.items()]
            some.clear()
            some.update(members)
        for key, item in list(some.items()) if isinstance(some, dict) else enumerate(some):
            if isinstance(item, str):
                some[key] = text(item)
            elif isinstance(item, dict | list):
                left.append(item)
    return whole[0], found
