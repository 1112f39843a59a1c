"""Fixtures of the flow tests; what they do is in place.py."""

from __future__ import annotations

from place import place, small

__all__ = ["place", "small"]
