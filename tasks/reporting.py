"""What Prefect shows of a run: log lines, events, a progress bar a partition, tables and a report.

Not tasks: they stand beside them, and the flow calls them from its own thread. Prompts and answers never
reach Prefect, and no setting that may be secret does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.events import emit_event

from promptmill import events
from promptmill.generation.mill import Mill
from promptmill.release.card import accounting_table, reject_list
from promptmill.run import Run
from promptmill.serving.supervisor import Life
from promptmill.types import Tally

_EVERY_S = 3.0
_FIGURES_S = 60.0


@contextmanager
def in_prefect() -> Iterator[None]:
    """Write this process's events into the flow run's log, and emit those that automations may want."""
    logger = get_run_logger()

    def show(event: events.Event) -> None:
        match event:
            case events.Figures():
                return
            case events.Died():
                logger.error("%s", event)
                _emit("promptmill.server.died", "server", event.name, cause=event.cause)
                return
            case events.Relaunching():
                _emit("promptmill.server.relaunched", "server", str(event.attempt), why=event.why)
            case events.GaveUp():
                logger.error("%s", event)
                _emit("promptmill.server.gave_up", "server", event.name, why=event.why)
                return
            case events.Quarantined():
                logger.error("%s", event)
                _emit("promptmill.prompt.quarantined", "prompt", event.prompt_hash[:32], row=event.row_id)
                return
            case events.Released() if event.new:
                _emit("promptmill.release.published", "release", event.revision, address=event.address)
        logger.info("%s", event)

    with events.listening(show):
        yield


class LiveFigures:
    """What runs now: a progress artifact a partition every few seconds, the figures every minute, at most."""

    def __init__(self, mill: Mill) -> None:
        self._mill = mill
        self._bars: dict[str, UUID] = {}
        self._shown: dict[str, float] = {}
        self._last = self._last_figures = 0.0

    def update(self, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now - self._last < _EVERY_S:
            return
        self._last = now
        figures = self._mill.figures()
        if always or now - self._last_figures >= _FIGURES_S:
            self._last_figures = now
            create_markdown_artifact(
                key="figures", markdown=_figures(figures), description="The pace and what has gone wrong."
            )
        for part in figures.partitions:
            percent = 100.0 * part.done / part.total if part.total else 100.0
            if part.partition not in self._bars:
                artifact = create_progress_artifact(
                    progress=percent,
                    key=_key("progress", part.partition),
                    description=f"{part.partition}: answers of {part.total:,} requests",
                )
                assert isinstance(artifact, UUID)
                self._bars[part.partition] = artifact
            elif percent != self._shown[part.partition]:
                update_progress_artifact(artifact_id=self._bars[part.partition], progress=percent)
            self._shown[part.partition] = percent


def show_lives(run: Run) -> None:
    """The table of the server's lives."""
    if run.servers.lives:
        create_table_artifact(
            key="server-lives",
            table=[life.to_row() for life in run.servers.lives],
            description="Every life of the server in this run: facts, answers, cause of death, remedy.",
        )


def deaths(lives: Sequence[Life]) -> str:
    """What ended the lives that have ended, as a numbered list."""
    ended = [life for life in lives if life.cause_of_death]
    return "".join(
        f"\n{number}. {life.server}: {life.cause_of_death}. {life.remedy}."
        for number, life in enumerate(ended, 1)
    )


def show_report(run: Run, tallies: Sequence[Tally], release: events.Released | None) -> None:
    """The report at the end, and a link to the release."""
    outcome = str(release) if release else "No release."
    lives = f"Server lives: {len(run.servers.lives)}; deaths: {len(run.servers.deaths)}."
    lives += deaths(run.servers.lives)
    create_markdown_artifact(
        key="report",
        markdown=f"# {outcome}\n\n{accounting_table(tallies)}\n\n{lives}\n\n"
        f"## Rejected\n\n{reject_list(tallies)}\n",
        description="The accounting of this run: every row read stands in exactly one column.",
    )
    if release:
        create_link_artifact(
            key="release",
            link=release.address,
            link_text=release.revision,
            description="The folder to give to datasets.load_dataset(folder, view).",
        )


def _figures(figures: events.Figures) -> str:
    """As Markdown, with a table of the servers."""
    per_gpu = figures.tokens_per_gpu_hour
    facts = [
        figures.pace,
        f"{per_gpu:,.0f} tokens a GPU-hour on {figures.gpus} GPUs" if per_gpu is not None else "",
        f"{figures.retractions:,} retractions for want of KV tokens" if figures.retractions else "",
        f"{figures.resumed_tokens:,} tokens of broken streams were not made again, for "
        f"{figures.refilled_tokens:,} prefilled again"
        if figures.resumed_tokens
        else "",
    ]
    rows = [
        f"| {s.server} | {s.in_flight} of {s.window} | {_shown(s.queued, 'd')} | {_shown(s.kv_use, '.0%')} |"
        for s in figures.servers
    ]
    table = ["| server | in flight | queued | KV in use |", "|---|---|---|---|", *rows]
    return "\n".join([*(f"- {fact}" for fact in facts if fact), "", *(table if rows else [])])


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _emit(event: str, kind: str, name: str, **payload: str) -> None:
    emit_event(event=event, resource={"prefect.resource.id": f"promptmill.{kind}.{name}"}, payload=payload)


def _key(*parts: str) -> str:
    """Artifact keys are lower case letters, digits and dashes."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in parts)
