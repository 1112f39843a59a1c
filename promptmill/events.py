"""What happens in a run, told to whoever listens: the terminal, Prefect, a test.

    with listening(print_event):
        ...

An event is a fact in one line (`str(event)`), with the numbers behind it as fields.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from promptmill.types import Manifest, Tally


@dataclass(frozen=True, slots=True)
class Event:
    """Base: something that a person would want to know."""


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A sentence without numbers that anybody needs."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Prepared(Event):
    manifest: Manifest
    reused: bool

    def __str__(self) -> str:
        m = self.manifest
        why = ", ".join(f"{n} {reason}" for reason, n in m.rejected.items())
        rejected = f", {m.rows - m.prompts} rejected ({why})" if why else ""
        again = "unchanged: " if self.reused else ""
        return f"{m.partition}: {again}{m.prompts} prompts ({m.format}), {m.prompt_tokens:,} tokens{rejected}"


@dataclass(frozen=True, slots=True)
class Launching(Event):
    name: str
    command: str
    ours: bool = True
    """False for a server that somebody else runs."""

    def __str__(self) -> str:
        return f"launching server {self.name}" if self.ours else f"attaching server {self.name}"


@dataclass(frozen=True, slots=True)
class Ready(Event):
    name: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        told = {"slots": "requests at a time", "kv_tokens": "KV tokens", "context_tokens": "tokens a request"}
        known = ", ".join(f"{self.facts[key]:,} {text}" for key, text in told.items() if self.facts.get(key))
        if (headroom := self.facts.get("headroom_gib")) is not None:
            known += f", {headroom:.2f} GiB of GPU memory free"
        return f"server {self.name} is ready after {self.facts['startup_s']:.1f} s" + (
            f": {known}" if known else ""
        )


@dataclass(frozen=True, slots=True)
class Died(Event):
    name: str
    cause: str

    def __str__(self) -> str:
        return f"SERVER DIED: {self.name}: {self.cause}"


@dataclass(frozen=True, slots=True)
class Quarantined(Event):
    """A prompt that kills the server; later runs do not send it again unless they are told to."""

    row_id: str
    prompt_hash: str
    partition: str

    def __str__(self) -> str:
        which = f"row {self.row_id} of {self.partition} ({self.prompt_hash[:16]})"
        return f"quarantined {which}: it kills the server"


@dataclass(frozen=True, slots=True)
class Relaunching(Event):
    attempt: int
    limit: int
    why: str

    def __str__(self) -> str:
        return f"relaunching ({self.attempt} of at most {self.limit}): {self.why}"


@dataclass(frozen=True, slots=True)
class GaveUp(Event):
    name: str
    why: str

    def __str__(self) -> str:
        return f"giving up on the server: {self.why}"


@dataclass(frozen=True, slots=True)
class Resuming(Event):
    done: int
    pending: int

    def __str__(self) -> str:
        start = f"resuming: {self.done:,} already done, " if self.done else ""
        return f"{start}{self.pending:,} to go"


@dataclass(frozen=True, slots=True)
class Released(Event):
    address: str
    revision: str
    new: bool
    rows: dict[str, int]

    def __str__(self) -> str:
        if not self.new:
            return f"nothing new: release {self.revision} at {self.address} stands"
        rows = ", ".join(f"{n:,} {view}" for view, n in self.rows.items())
        return f"released {self.revision}: {rows} → {self.address}"


@dataclass(frozen=True, slots=True)
class Progress:
    """One partition, now."""

    partition: str
    total: int
    """Requests that this partition needs in all."""
    done: int
    in_flight: int
    tokens: int
    """Generated in this run."""


@dataclass(frozen=True, slots=True)
class Serving:
    """One server, now. None is what it does not tell."""

    server: str
    in_flight: int
    window: int
    """Requests that it is given at a time."""
    queued: int | None = None
    kv_use: float | None = None
    """Share of its KV tokens that is in use."""


@dataclass(frozen=True, slots=True)
class Figures(Event):
    """The whole mill, now. Sent about once a second while it runs."""

    partitions: list[Progress]
    servers: list[Serving]
    tokens_per_s: float
    answers_per_s: float
    seconds_left: float | None
    gpus: int = 0
    """GPUs of the servers that tell; 0: none does."""
    retractions: int = 0
    """Times that a server sent a running request back to its queue, for want of KV tokens."""
    resumed_tokens: int = 0
    """Tokens that broken streams had given and that were not made again."""
    refilled_tokens: int = 0
    """Prompt and output tokens that were prefilled again for that."""

    @property
    def in_flight(self) -> int:
        return sum(server.in_flight for server in self.servers)

    @property
    def tokens_per_gpu_hour(self) -> float | None:
        return self.tokens_per_s * 3600 / self.gpus if self.gpus else None

    def __str__(self) -> str:
        done = sum(p.done for p in self.partitions)
        total = sum(p.total for p in self.partitions)
        return f"{done:,} of {total:,} answered, {self.pace}"

    @property
    def pace(self) -> str:
        """How fast, how full and how long, as far as it is known."""
        parts = [f"{self.tokens_per_s:,.0f} tokens/s", f"{self.answers_per_s:.1f} answers/s"]
        parts += [f"{self.in_flight} of {sum(server.window for server in self.servers)} in flight"]
        if queued := [server.queued for server in self.servers if server.queued is not None]:
            parts += [f"{sum(queued)} queued"]
        if uses := [server.kv_use for server in self.servers if server.kv_use is not None]:
            parts += [f"KV {max(uses):.0%}"]
        if self.seconds_left is not None:
            parts += [f"about {duration(self.seconds_left)} left"]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Accounted(Event):
    tallies: list[Tally] = field(default_factory=list)

    def __str__(self) -> str:
        parts = []
        for tally in self.tallies:
            counts = ", ".join(
                f"{n} {status}" for status, n in tally.to_json().items() if n and status != "rows"
            )
            parts.append(f"{tally.partition}: {tally.rows} rows = {counts or 'none'}")
        return "; ".join(parts)


Listener = Callable[[Event], None]
_listeners: list[Listener] = []
_lock = threading.Lock()


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Every event of this process goes to `listener`, from the thread in which it happens."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def tell(event: Event) -> None:
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener(event)


def duration(seconds: float) -> str:
    """`42 s`, `3 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
