"""Preparing a partition, as a Prefect task."""

from __future__ import annotations

import hashlib
from typing import Any

from prefect import task

from promptmill.prompts.manifest import prepare
from promptmill.run import Run


def _unchanged(_: object, parameters: dict[str, Any]) -> str:
    """Our own text as the key, so that an unchanged source shows as Cached the next night."""
    run: Run = parameters["run"]
    where = hashlib.sha256(str(run.store.manifests.resolve()).encode()).hexdigest()[:12]
    return f"prepare-{parameters['partition']}-{where}-{run.preparation(parameters['partition']).key()}"


@task(
    task_run_name="prepare {partition}",
    cache_key_fn=_unchanged,
    persist_result=True,
    result_serializer="json",
)
def prepare_partition(run: Run, partition: str, anew: bool = False) -> dict[str, Any]:
    """Read, render, count and hash a partition's prompts; its manifest as plain data.

    What lies there prepared is taken as it is, whatever Prefect remembers of it, unless it is wanted `anew`.
    """
    prepared = None if anew else run.prepared(partition)
    return (prepared or prepare(run.preparation(partition))).to_json()
