"""Fixtures of the chaos tests; what they do is in containers.py and in the flow tests' place.py."""

from __future__ import annotations

from tests.chaos.containers import docker
from tests.flow.place import migrated, place

__all__ = ["docker", "migrated", "place"]
