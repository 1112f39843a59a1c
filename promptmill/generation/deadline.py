"""When a run ends by the clock. Pure."""

from __future__ import annotations

from datetime import datetime, timedelta

from promptmill.settings import RunSettings


def end_of_run(run: RunSettings, start: datetime) -> datetime | None:
    """The earlier of `max_hours` after `start` and the next time that the clock shows `stop_at`."""
    ends = []
    if run.max_hours is not None:
        ends.append(start + timedelta(hours=run.max_hours))
    if run.stop_at is not None:
        hour, minute = map(int, run.stop_at.split(":"))
        end = start.replace(hour=hour, minute=minute, second=0, microsecond=0)
        ends.append(end if end > start else end + timedelta(days=1))
    return min(ends, default=None)
