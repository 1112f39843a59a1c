"""Imported by the process that runs are forked from."""

from tests.chaos.small_run import preload

preload()
