"""The walk of docs/quickstart.md: a server, a work pool, a worker, `prefect deployment run`."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from place import ANSWERS, ROOT, ROWS, TEST_S, Place, end, prefect_server, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]


@contextmanager
def served(place: Place) -> Iterator[httpx.Client]:
    """A Prefect server and a worker of the pool `promptmill`; yields a client of the API."""
    place.env["PREFECT_WORKER_QUERY_SECONDS"] = "0.5"
    with prefect_server(place), httpx.Client(base_url=place.api_url, trust_env=False, timeout=60) as api:
        create = place.run("prefect", "work-pool", "create", "promptmill", "--type", "process")
        assert create.returncode == 0, create.stdout + create.stderr
        deploy = place.run("prefect", "--no-prompt", "deploy", "--all")
        assert deploy.returncode == 0, deploy.stdout + deploy.stderr
        worker = place.start("prefect", "worker", "start", "--pool", "promptmill", log="worker.log")
        try:
            yield api
        finally:
            end(worker)


NO_TIME_TO_START = ["server.startup_timeout_s=0.01", "server.max_relaunches=0"]


def by_command(place: Place, overrides: list[str], status: int) -> None:
    """Run on-demand to its end, as the quickstart does."""
    done = place.run(
        "prefect", "deployment", "run", "regenerate/on-demand", "--watch",
        "-p", "profile=small.toml", "-p", f"overrides={json.dumps(overrides)}",
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr + (place.folder / "worker.log").read_text()


def by_request(api: httpx.Client) -> None:
    """The same through the API: each command imports Prefect for seconds."""
    deployment = api.get("/deployments/name/regenerate/on-demand").json()["id"]
    wanted = {"parameters": {"profile": "small.toml"}, "state": {"type": "SCHEDULED"}}
    flow_run = api.post(f"/deployments/{deployment}/create_flow_run", json=wanted).json()["id"]
    ends = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
    wait_for(lambda: api.get(f"/flow_runs/{flow_run}").json()["state_type"] in ends, "the flow run", 0.5)


def last_run(api: httpx.Client) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The flow run that started last, and its task runs."""
    started = {"flow_runs": {"start_time": {"is_null_": False}}}  # the nightly schedule has runs to come
    flow_runs = api.post("/flow_runs/filter", json={**started, "sort": "START_TIME_DESC", "limit": 1}).json()
    wanted = {"flow_runs": {"id": {"any_": [flow_runs[0]["id"]]}}}
    return flow_runs[0], api.post("/task_runs/filter", json=wanted).json()


def test_deployment_runs_and_the_second_time_is_cached_without_a_server(small: Place) -> None:
    shutil.copy(ROOT / "prefect.yaml", small.folder)
    with served(small) as api:
        by_command(small, NO_TIME_TO_START, status=1)
        flow_run, tasks = last_run(api)
        assert flow_run["state_name"] == "Failed"
        assert {t["state_name"] for t in tasks if t["name"].startswith("generate")} == {"Failed"}

        by_request(api)
        flow_run, tasks = last_run(api)
        assert flow_run["state_name"] == "Completed"
        kinds = Counter(task["name"].split("-")[0].split(" ")[0] for task in tasks)
        assert kinds == {
            "prepare": 2,
            "launch_server": 1,
            "health_gate": 1,
            "generate": 2,
            "publish_dataset": 1,
        }
        states = {task["name"].split(" ")[0]: task["state_name"] for task in tasks}
        assert states.pop("prepare") == "Cached"
        assert set(states.values()) == {"Completed"}, "a failure is not served as a result"

        artifacts = sorted(api.post("/artifacts/filter", json={}).json(), key=lambda a: a["created"])
        by_key = {artifact["key"]: artifact for artifact in artifacts}  # the latest of each
        progress = {"progress-a-text", "progress-b-turns"}
        assert by_key.keys() >= {*progress, "figures", "server-lives", "report", "release"}
        assert " tokens/s, " in by_key["figures"]["data"]
        assert by_key["progress-a-text"]["data"] == 100.0
        lives = json.loads(by_key["server-lives"]["data"])
        assert len(lives) == 1
        assert lives[0]["answers"] == ANSWERS
        assert f"| A_text | {ROWS['A_text']} |" in by_key["report"]["data"]

        by_request(api)
        flow_run, tasks = last_run(api)
        assert flow_run["state_name"] == "Completed"
        states = {task["name"]: task["state_name"] for task in tasks}
        assert {name.split("-")[0] for name in states} == {
            "prepare A_text",
            "prepare B_turns",
            "generate A_text",
            "generate B_turns",
            "publish_dataset",
        }
        assert {state for name, state in states.items() if "publish" not in name} == {"Cached"}

        deployments = api.post("/deployments/filter", json={}).json()
        nightly = next(d for d in deployments if d["name"] == "nightly")
        assert nightly["schedules"][0]["slug"] == "nightly"
        assert nightly["schedules"][0]["schedule"]["timezone"] == "UTC"
        assert nightly["global_concurrency_limit"]["limit"] == 1

        file = str(ROOT / "deployments/crashed-runs.yaml")
        made = small.run("prefect", "automation", "create", "--from-file", file)
        assert made.returncode == 0, made.stdout + made.stderr
        (automation,) = api.post("/automations/filter", json={}).json()
        assert automation["trigger"]["after"] == ["prefect.flow-run.heartbeat"]
        assert automation["actions"][0]["state"] == "CRASHED"
        assert {d["name"] for d in deployments} == {"demo", "on-demand", "nightly"}
    assert small.wait_until_empty() == []
