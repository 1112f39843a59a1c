"""A server's life, as Prefect tasks: every launch, gate and diagnosis is a task run of its own."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from promptmill.errors import LaunchFailed
from promptmill.serving.facts import Facts
from promptmill.serving.remedies import Verdict
from promptmill.serving.server import Lost, Server
from promptmill.serving.supervisor import Supervisor


@task(cache_policy=NO_CACHE, persist_result=False)
def launch_server(servers: Supervisor) -> list[Server]:
    """Start the next life, or take the servers that somebody else runs."""
    return servers.launch()


@task(task_run_name="health_gate {server.name}", cache_policy=NO_CACHE, persist_result=False)
def health_gate(servers: Supervisor, server: Server, longest_request_tokens: int) -> Facts:
    """Wait until the server is healthy and ours, and has answered. Raises LaunchFailed."""
    return servers.pass_gate(server, longest_request_tokens)


@task(cache_policy=NO_CACHE, persist_result=False)
def diagnose_server(servers: Supervisor, ended: Lost | LaunchFailed) -> Verdict:
    """Why a life ended, and what the next one is launched with, if there is to be one."""
    return servers.diagnose(ended)
