"""Runs in every Python started with this folder on PYTHONPATH, so it imports nothing heavy.

It hands on to the next sitecustomize on the path.
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

import torchvision_operators  # noqa: F401

_HERE = __file__.rpartition("/")[0]


def _next_sitecustomize() -> ModuleSpec | None:
    elsewhere = [folder for folder in sys.path if folder.rstrip("/") != _HERE]
    return PathFinder.find_spec("sitecustomize", elsewhere)


gc.set_threshold(20_000, 20, 100)  # 3,000 modules are imported in each of three processes: seconds less
_spec = _next_sitecustomize()
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
