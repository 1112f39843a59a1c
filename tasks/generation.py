"""Answering a partition, as a Prefect task that survives the death of its server."""

from __future__ import annotations

import hashlib
from typing import Any

from prefect import task
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from promptmill.errors import ServerDied
from promptmill.generation.mill import Mill
from promptmill.run import Run
from promptmill.types import Manifest


def _same_prompts(_: object, parameters: dict[str, Any]) -> str:
    """The hash of all prompt hashes and the store that holds their answers."""
    run: Run = parameters["run"]
    manifest: Manifest = parameters["manifest"]
    store = f"{run.store.journal_path.resolve()} {run.store.url}"
    where = hashlib.sha256(store.encode()).hexdigest()[:12]
    return f"generate-{manifest.partition}-{where}-{manifest.digest[:32]}-{manifest.max_new_tokens}"


def _server_died(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    """Only a lost server is a reason to try again; what was answered is in the store."""
    return isinstance(state.result(raise_on_failure=False), ServerDied)


@task(
    task_run_name="generate {manifest.partition}",
    cache_key_fn=_same_prompts,
    persist_result=True,
    result_serializer="json",
    retry_condition_fn=_server_died,
    retry_delay_seconds=0,  # the retry itself waits for the next server
)
def generate_partition(run: Run, mill: Mill, manifest: Manifest) -> dict[str, Any]:
    """Answer what is pending of a partition; its accounting as plain data."""
    return mill.generate(manifest.partition).to_json()
