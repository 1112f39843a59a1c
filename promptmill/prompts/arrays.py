"""A file that is one JSON array, item by item: no more of it is in memory than an item and a block."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from promptmill.prompts import json_text

_BLOCK = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")
_TOKEN = 32
"""An error this close to the end of what is read may come from the end: half a number or word."""
_decoder = json.JSONDecoder()


class Broken(Exception):
    """What is no array from here on. `reason` is that of a reject."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def starts_with_array(head: bytes) -> bool:
    """Whether a file that starts with `[` is an array, and not JSON lines the first of which holds one."""
    line, newline, behind = head.lstrip().partition(b"\n")
    if not newline or not behind.strip():
        return True
    try:
        json_text.loads(line)
    except ValueError:
        return True
    return False


def array_items(stream: IO[bytes]) -> Iterator[tuple[Any, bool]]:
    """Each item, and whether a lone surrogate in it was replaced. Raises Broken."""
    text = _Text(stream)
    text.skip("[")
    if text.next() == "]":
        text.skip("]")
    else:
        while True:
            yield json_text.clean(text.item())
            if text.next() == "]":
                text.skip("]")
                break
            text.skip(",")
    if text.next():
        raise Broken("bad_json", "the array has ended, and something follows")


class _Text:
    """What was read of the stream and not yet taken."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogatepass").decode
        self._text = ""
        self._at = 0
        self._over = False
        self._not_text = False

    def next(self) -> str:
        """The next character that is no white space, or "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]  # it matches nothing too
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def skip(self, wanted: str) -> None:
        found = self.next()
        if not found:
            raise self._ended(f"where {wanted!r} belongs")
        if found != wanted:
            raise Broken("bad_json", f"{wanted!r} expected, found {found!r}")
        self._at += 1

    def item(self) -> Any:
        if not self.next():
            raise self._ended("inside the array")
        while True:
            try:
                value, end = _decoder.raw_decode(self._text, self._at)
                if end < len(self._text) - _TOKEN or not self._more():
                    self._at = end
                    return value
            except RecursionError:
                raise Broken("bad_json", "nested too deeply") from None
            except json.JSONDecodeError as error:
                open_end = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _TOKEN
                if not open_end:
                    raise Broken("bad_json", error.msg) from None
                if not self._more():
                    raise self._ended(f"inside an item: {error.msg}") from None
            except ValueError as error:  # a number of thousands of digits
                raise Broken("bad_json", str(error)) from None

    def _more(self) -> bool:
        """Read on: as much as is there, so that a long item is not begun anew for each block."""
        if self._over:
            return False
        self._text, self._at = self._text[self._at :], 0
        data = self._stream.read(max(_BLOCK, len(self._text)))
        self._over = not data
        try:
            self._text += self._decode(data, final=self._over)
        except UnicodeDecodeError as error:
            self._text += error.object[: error.start].decode("utf-8", "surrogatepass")
            self._over, self._not_text = True, True
        return True

    def _ended(self, where: str) -> Broken:
        if self._not_text:
            return Broken("bad_json", f"bytes that are no UTF-8 {where}")
        return Broken("cut_line", f"the file ends {where}")
