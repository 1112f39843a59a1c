"""Builders of the tests of remedies."""

from __future__ import annotations

from typing import Any

from promptmill.serving.remedies import Death, decide
from promptmill.serving.signatures import Evidence

FRACTION = "mem-fraction-static"
HICACHE = {"enable-hierarchical-cache": True}
NEW, OLD = (0, 5, 23), (0, 5, 9)


def death(signature: str = "", life: int = 0, **more: Any) -> Death:
    """A life that was serving; with numbers, a line and a log_phase for its evidence."""
    numbers, line = more.pop("numbers", {}), more.pop("line", "")
    log_phase = more.pop("log_phase", "serving")
    evidence = Evidence(signature, line, numbers, log_phase) if signature else None
    server = f"promptmill-{life}"
    fields = {"phase": "serving", "cause": "killed by signal 9", "exit_status": -9, "answers": 0, "flags": {}}
    fields |= more
    return Death(server, evidence=evidence, **{**fields, "cause": fields["cause"].format(server=server)})


def headroom(fraction: float | None, left: float = 0.82, **more: Any) -> Death:
    flags = {} if fraction is None else {FRACTION: fraction}
    told = {"headroom_gib": left, "wanted_gib": 2.0}
    return death("low_headroom", phase="start", flags=flags, numbers=told, exit_status=None, **more)


def steps_of(*deaths: Death, version: tuple[int, ...] | None = None) -> dict[str, Any]:
    """What is changed, by flag."""
    verdict = decide(deaths, 99, version)
    assert verdict.action == "step", verdict
    assert "kv-cache-dtype" not in str(verdict.steps)
    return {step.flag: step.after for step in verdict.steps}
