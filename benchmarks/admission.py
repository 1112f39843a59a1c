"""What the admission policy is measured by: 8,799 prompts, shaped like those of the Kimi-K2.5 run."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

from promptmill.planning.simulation import Work

WORKLOAD = Path(__file__).with_name("admission_workload.csv.gz")


def read_workload(prompts: int) -> list[Work]:
    """The first so many of them."""
    with gzip.open(WORKLOAD, "rt", encoding="utf-8") as file:
        rows = [*csv.DictReader(file)][:prompts]
    return [
        Work(
            f"p{number}",
            row["partition"],
            row["family"],
            *(int(row[f"{name}_tokens"]) for name in ("shared_prefix", "prompt", "max_new", "output")),
        )
        for number, row in enumerate(rows)
    ]
