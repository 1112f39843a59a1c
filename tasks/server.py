"""A server's life, as Prefect tasks: every launch, gate and diagnosis is a task run of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from promptmill.errors import LaunchFailed
from promptmill.generation.mill import Lost
from promptmill.run import Run
from promptmill.serving.gate import Facts
from promptmill.serving.remedies import Verdict
from promptmill.serving.server import Server
from promptmill.types import Manifest


@task(cache_policy=NO_CACHE, persist_result=False)
def launch_server(run: Run) -> list[Server]:
    """Start the next life, or take the servers that somebody else runs."""
    return run.launch()


@task(task_run_name="health_gate {server.name}", cache_policy=NO_CACHE, persist_result=False)
def health_gate(run: Run, server: Server, manifests: Sequence[Manifest]) -> Facts:
    """Wait until the server is healthy and ours, and has answered. Raises LaunchFailed."""
    return run.pass_gate(server, manifests)


@task(cache_policy=NO_CACHE, persist_result=False)
def diagnose_server(run: Run, ended: Lost | LaunchFailed) -> Verdict:
    """Why a life ended, and whether the next one begins."""
    return run.diagnose(ended)
