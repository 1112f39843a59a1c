"""The order of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = (
    "flow/test_readme.py",
    "chaos/test_random_faults.py",
    "flow/test_deployment.py",
    "flow/test_kimi_run.py",
    "flow/test_run.py",
    "contract/test_sglang.py",
    "flow/test_sglang_run.py",
)
"""Modules that take a minute and more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long modules begin: at the end of `make unit` no worker waits for the other."""
    here = Path(__file__).parent
    rank = {here / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path, len(LONG)))
