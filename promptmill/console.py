"""What a person at a terminal sees of a run: events as lines, and below them a bar for each partition.

Where standard output is no terminal, plain lines, with the figures every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from promptmill import events
from promptmill.prompts.reasons import with_remedy
from promptmill.release.card import accounting_table
from promptmill.types import STATUSES, Tally

_PLAIN_FIGURES_S = 10.0
_LOUD = {
    events.Died: "bold red",
    events.Relaunching: "yellow",
    events.GaveUp: "bold red",
    events.Quarantined: "bold red",
}
_GOOD = {events.Ready: "green", events.Resuming: "bold green", events.Released: "bold green"}


@contextmanager
def shown() -> Iterator[None]:
    """Events of this process appear on standard output until the block ends."""
    console = Console(highlight=False)
    if console.is_terminal:
        with _Bars(console) as bars, events.listening(bars):
            yield
    else:
        with events.listening(_Plain()):
            yield


class _Plain:
    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, event: events.Event) -> None:
        now = time.monotonic()
        if isinstance(event, events.Accounted):
            return  # printed as a table at the end
        if isinstance(event, events.Figures):
            if now - self._last < _PLAIN_FIGURES_S:
                return
            self._last = now
        # One write: events come from several threads.
        print(f"{time.strftime('%H:%M:%S')} {event}\n", end="", flush=True)


class _Bars:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.Figures):
            self._show(event)
        elif not isinstance(event, events.Accounted):
            style = {**_LOUD, **_GOOD}.get(type(event), "")
            self._console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim]", end=" ")
            self._console.print(str(event), style=style, markup=False)

    def _show(self, figures: events.Figures) -> None:
        for part in figures.partitions:
            note = f"{part.in_flight} in flight, {part.tokens:,} tokens"
            self._update(part.partition, part.total, part.done, note)
        total = sum(p.total for p in figures.partitions)
        done = sum(p.done for p in figures.partitions)
        self._update("all", total, done, figures.pace)

    def _update(self, name: str, total: int, done: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, note=note)
        self._progress.update(self._tasks[name], total=total, completed=done, note=note)


def print_accounting(tallies: Sequence[Tally]) -> None:
    """The accounting as a table, or as Markdown where there is no terminal."""
    if not sys.stdout.isatty():
        print(accounting_table(tallies))
    else:
        # Narrow: at 80 columns no heading may be cut.
        table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
        table.add_column("partition", overflow="fold")
        for heading in ("rows", *STATUSES):
            table.add_column(heading, justify="right", no_wrap=True, min_width=len(heading))
        for tally in tallies:
            counts = (str(tally.counts[status]) if tally.counts[status] else "·" for status in STATUSES)
            table.add_row(tally.partition, str(tally.rows), *counts)
        Console().print(table)
    for tally in tallies:
        for reason, n in tally.rejected.items():
            print(f"  {tally.partition}: {n} rejected: {with_remedy(reason)}")
