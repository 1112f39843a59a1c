"""Fixtures of the flow tests; what they do is in place.py."""

from __future__ import annotations

from place import migrated, place, shared_api, small

__all__ = ["migrated", "place", "shared_api", "small"]
