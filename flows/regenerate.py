"""The chain: prepare → launch → gate → generate → publish; relaunch when a server dies."""

from __future__ import annotations

from typing import Any

from prefect import State, flow
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner

from promptmill import events
from promptmill.errors import LockHeld
from promptmill.lives import Steps, keep_served
from promptmill.profile import load_profile
from promptmill.run import Run, RunRequest, run_note
from promptmill.types import Manifest
from tasks.generation import generate_partition
from tasks.prompts import prepare_partition
from tasks.publishing import publish_dataset
from tasks.reporting import LiveFigures, in_prefect, show_lives, show_report
from tasks.server import diagnose_server, health_gate, launch_server

# A partition's task waits in a thread of its own while the flow's thread looks after the server.
_THREADS: Any = ThreadPoolTaskRunner(max_workers=256)


@flow(name="regenerate", task_runner=_THREADS, persist_result=False)
def regenerate(
    profile: str = "demo",
    partitions: list[str] | None = None,
    limit: int | None = None,
    overrides: list[str] | None = None,
    refresh: bool = False,
    retry_failed: bool = False,
    accept_redo: bool = False,
) -> dict[str, Any] | State[Any]:
    """Answer every prompt of a profile and publish the dataset.

    Args:
        profile: A name in deployments/, or the path of a TOML file.
        partitions: Names of the partitions to work on; all of them if empty.
        limit: Rows to read of each partition.
        overrides: Settings as "a.b=value".
        refresh: Read and render the prompts again, although their source is unchanged.
        retry_failed: Ask again what failed in earlier runs.
        accept_redo: Go on although more than 5 % of the answered rows would be asked again.

    Returns the accounting by partition, the release, and why the run stopped early if it did. Ends Cancelled
    where another run works on the same store.
    """
    request = RunRequest(tuple(partitions or ()), limit, retry_failed, accept_redo)
    settings = load_profile(profile, overrides or [])
    try:
        with in_prefect(), Run.open(settings, request, run_note(profile)) as run:
            manifests = _prepare(run, refresh)
            stopped = _generate(run, manifests)
            report = _publish(run, manifests, stopped)
    except LockHeld as error:
        return Cancelled(message=str(error))
    if stopped:
        return Completed(message=f"partial: {stopped}", data=report)
    return report


def _prepare(run: Run, refresh: bool) -> list[Manifest]:
    """Read and render all partitions before any server is started."""
    before = {} if refresh else {name: run.prepared(name) for name in run.partitions}
    futures = {
        name: prepare_partition.with_options(refresh_cache=refresh or not run.is_prepared(name)).submit(
            run, name, refresh
        )
        for name in run.partitions
    }
    manifests = [Manifest.from_json(future.result()) for future in futures.values()]
    for manifest, future in zip(manifests, futures.values(), strict=True):
        reused = future.state.name == "Cached" or manifest == before.get(manifest.partition)
        events.tell(events.Prepared(manifest, reused))
    run.accept(manifests)
    return manifests


def _generate(run: Run, manifests: list[Manifest]) -> str:
    """Answer what is pending, life after life; returns why the run was stopped early, if it was."""
    with run.mill(manifests) as mill:
        answered = [
            # The store is the truth: a partition with pending rows is not taken from Prefect's cache.
            generate_partition.with_options(
                refresh_cache=mill.is_pending(manifest.partition),
                retries=run.profile.server.max_relaunches + 1,
            ).submit(run, mill, manifest)
            for manifest in manifests
        ]
        bars = LiveFigures(mill)
        steps = Steps(launch_server, health_gate, diagnose_server)
        for changed in keep_served(run.servers, mill, run.longest_request_tokens(manifests), steps):
            bars.update()
            if changed:
                show_lives(run)
        try:
            for future in answered:
                future.result()
        finally:
            run.servers.note_answers(mill.answers_by_server())
            bars.update(always=True)
            show_lives(run)
        return mill.stopping


def _publish(run: Run, manifests: list[Manifest], stopped: str) -> dict[str, Any]:
    """The release and the report; a run that was stopped publishes only what its profile allows."""
    everything = run.with_others(manifests)
    tallies = run.tally(everything)
    events.tell(events.Accounted(tallies))
    release = None
    try:
        if not stopped or run.profile.release.allow_incomplete or not any(t.pending for t in tallies):
            published = publish_dataset(run, everything)
            release = events.Released(published.address, published.revision, published.new, published.rows)
    finally:
        show_report(run, tallies, release)
    return {
        "partitions": {tally.partition: tally.to_json() for tally in tallies},
        "release": {"revision": release.revision, "path": release.address, "new": release.new}
        if release
        else None,
        "stopped": stopped,
    }
