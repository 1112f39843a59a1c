"""A server's log of any length as a digest in constant memory: facts, counters, and signatures of a death.

    digest = read_log(path)
    evidence = classify(digest, exit_status, "start")

Nothing secret leaves it: of the server's arguments named fields are kept, in the tail keys are masked.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from promptmill.serving.log_lines import (
    SHAPES,
    UNREAD,
    LogEvent,
    parse_line,
    parse_message,
    split_line,
    without_ansi,
)
from promptmill.serving.signatures import LOG_PHASES, SIGNATURES, LogPhase, Match, Seen, signatures_in

__all__ = ["LogDigest", "LogEvent", "LogFacts", "parse_line", "read_log"]

_BLOCK = 1 << 20
_LINE_BYTES = 64 << 10
_KEPT_CHARS = 2_000
_TAIL_LINES = 40
_MAX_RANKS = 4_096
# A traceback is shorter than this.
_TRACEBACK_LINES = 500

_ARGUMENTS = ("server_args=", "launch_command")
_SECRET = re.compile(r"""((?:api[-_]key|Bearer)['"]?[\s:=]+)('[^']*'?|"[^"]*"?|[^\s,)]+)""", re.IGNORECASE)
_NEEDLES = {shape.needle for shape in SHAPES}.union(*(signature.needles for signature in SIGNATURES))
# Less those that hold another one. Looked for one by one, and in text: a regular expression of them all takes
# three times as long, and `in` takes four times as long on bytes.
_TELLING = [n for n in sorted(_NEEDLES) if not any(m in n for m in _NEEDLES - {n})]
_PHASE_AFTER: Mapping[str, LogPhase] = {
    "weights_begin": "loading",
    "weights_end": "kv",
    "kv_pool": "kv",
    "memory_pool": "kv",
    "graph_begin": "graphs",
    "graph_end": "graphs",
    "capacity": "warmup",
    "ready": "serving",
}
_FACTS: Mapping[str, Mapping[str, str]] = {
    "args": {"kv_dtype": "kv_cache_dtype", "context_tokens": "context_length"}
    | {name: name for name in ("mem_fraction_static", "chunked_prefill_size", "max_running_requests")}
    | {"cuda_graph_max_bs": "cuda_graph_max_bs"},
    "weights_end": {"weights_gib": "weights_gib", "model_class": "model_class"},
    "kv_pool": {"kv_tokens": "tokens", "kv_dtype": "dtype"},
    "capacity": {"kv_tokens": "max_total_num_tokens", "context_tokens": "context_len"}
    | {name: name for name in ("chunked_prefill_size", "max_running_requests")},
}


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a log says of its server; None is what it does not tell."""

    kv_tokens: int | None = None
    kv_dtype: str | None = None
    context_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    mem_fraction_static: float | None = None
    cuda_graph_max_bs: int | None = None
    headroom_gib: float | None = None
    """GPU memory left when the start was done, on the rank that has least; None on a CPU."""
    weights_gib: float | None = None
    model_class: str | None = None
    fp8_without_scales: bool = False
    ready: bool = False


class LogDigest:
    """A log as far as it was fed."""

    def __init__(self) -> None:
        self.facts = LogFacts()
        self.phase: LogPhase = "arguments"
        self.retractions = self.health_failures = 0
        self.decode_lines = self.prefill_lines = self.lines = 0
        self.last_decode: LogEvent | None = None
        self.matches: dict[str, Match] = {}
        self._pending = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._headroom: dict[str, float] = {}
        self._on_cpu = False
        self._settled: set[str] = set()
        self._least_kv = 0
        self._crash_at = -_TRACEBACK_LINES

    @property
    def progress(self) -> int:
        """Batches that were logged."""
        return self.decode_lines + self.prefill_lines

    @property
    def tail(self) -> deque[str]:
        """The last lines, cut and without secrets."""
        return deque((_shown(line) for line in self._tail), maxlen=_TAIL_LINES)

    def feed(self, data: bytes) -> None:
        """Take what the log grew by, however it is cut."""
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            head, end, rest = (block.replace(b"\r", b"\n") if b"\r" in block else block).partition(b"\n")
            self._pending += head[: max(0, _LINE_BYTES - len(self._pending))]
            if end:
                whole, end, last = rest.rpartition(b"\n")
                self._take(self._pending + b"\n" + whole if end else self._pending)
                self._pending = last[:_LINE_BYTES]

    def finish(self) -> None:
        """Take a last line that has no end as if it had one."""
        if self._pending:
            self._take(self._pending)
            self._pending = b""

    def _take(self, whole: bytes) -> None:
        lines = whole.decode("utf-8", "replace").split("\n")
        decode = ""
        for number, line in enumerate(lines, self.lines):
            if "] Decode batch" in line and "rror" not in line:
                self.decode_lines += 1
                decode = line
            elif "] Prefill batch" in line and "rror" not in line:
                self.prefill_lines += 1
            elif "INFO:  " not in line and _tells(line):
                self._read(line[:_LINE_BYTES], number)
        self.lines += len(lines)
        if decode:
            self.last_decode = parse_line(decode[:_LINE_BYTES])
        for line in lines[-10 * _TAIL_LINES :]:
            if line.strip():
                if self._tail and _is_bar(line) and _is_bar(self._tail[-1]):
                    self._tail.pop()
                self._tail.append(line[:_KEPT_CHARS])

    def _read(self, line: str, number: int) -> None:
        rank, message = split_line(line)
        event = parse_message(rank, message)
        if event:
            self._apply(event, number)
        if message.startswith(UNREAD) or (event and event.kind == "args"):
            return
        for name in signatures_in(message, self.phase):
            if name == "exception" and self.phase == "serving" and number - self._crash_at > _TRACEBACK_LINES:
                continue  # raised while a request was handled, and survived
            seen = Seen(_shown(f"[{rank}] {message}" if rank else message), number, self.phase, self.progress)
            known = self.matches.get(name)
            self.matches[name] = Match(known.first, seen) if known else Match(seen, seen)

    def _apply(self, event: LogEvent, number: int) -> None:
        after = _PHASE_AFTER.get(event.kind, self.phase)
        self.phase = max(self.phase, after, key=LOG_PHASES.index)
        match event.kind:
            case "decode":
                self.decode_lines += 1
                self.last_decode = event
            case "prefill":
                self.prefill_lines += 1
            case "retraction":
                self.retractions += 1
            case "health_failed":
                self.health_failures += 1
            case "scheduler_exception":
                self._crash_at = number
            case _:
                self._learn(event)

    def _learn(self, event: LogEvent) -> None:
        values = event.values
        if event.kind in ("graph_end", "kv_pool", "capacity"):
            self._on_cpu = self._on_cpu or "available_cpu_gib" in values
            if "available_gib" in values and len(self._headroom) < _MAX_RANKS:
                self._headroom[event.rank] = float(values["available_gib"])
        known: dict[str, Any] = {
            fact: values[name]
            for fact, name in _FACTS.get(event.kind, {}).items()
            if name in values and values[name] != "auto"
        }
        if event.kind in ("weights_end", "kv_pool"):  # a drafter's come second
            known = {fact: value for fact, value in known.items() if fact not in self._settled}
            self._settled.update(known)
        elif event.kind == "capacity" and "kv_tokens" in known:
            tokens = known["kv_tokens"]
            known["kv_tokens"] = self._least_kv = min(self._least_kv or tokens, tokens)
        known["headroom_gib"] = None if self._on_cpu else min(self._headroom.values(), default=None)
        known["ready"] = self.facts.ready or event.kind == "ready"
        known["fp8_without_scales"] = self.facts.fp8_without_scales or event.kind == "fp8_without_scales"
        self.facts = replace(self.facts, **known)


def _tells(line: str) -> bool:
    """Whether it may be of interest. A plain loop: a generator would take as long again."""
    for needle in _TELLING:  # noqa: SIM110
        if needle in line:
            return True
    return False


def _is_bar(line: str) -> bool:
    """Of a progress bar, which writes itself anew for hours."""
    return "it/s" in line or "s/it" in line


def _shown(line: str) -> str:
    """Fit for people, and for keeping."""
    text = without_ansi(line[:_KEPT_CHARS])
    for mark in _ARGUMENTS:
        if mark in text:
            text = text.partition(mark)[0] + mark + "…"
    low = text.lower()
    return _SECRET.sub(r"\1***", text) if "api" in low or "bearer" in low else text


def read_log(path: Path) -> LogDigest:
    """The digest of a whole file. A file that is missing or cannot be read tells nothing."""
    digest = LogDigest()
    with suppress(OSError), path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.feed(block)
    digest.finish()
    return digest
