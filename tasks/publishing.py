"""Publishing the dataset, as a Prefect task that is retried alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import Task

from promptmill.errors import ReleaseError, ReleaseRefused
from promptmill.release.dataset import Release
from promptmill.run import Run
from promptmill.types import Manifest


def _may_pass(_: Task[..., Any], __: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, ReleaseError) and not isinstance(error, ReleaseRefused)


@task(
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=2,
    retry_delay_seconds=[2, 10],
    retry_condition_fn=_may_pass,
)
def publish_dataset(run: Run, manifests: Sequence[Manifest]) -> Release:
    """Publish the answers, or find that nothing changed. Raises ReleaseError."""
    return run.publish(manifests)
