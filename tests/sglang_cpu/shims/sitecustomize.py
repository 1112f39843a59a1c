"""Declares two operators right before torchvision is imported, which cannot load its own beside a CPU torch.

torchvision registers fake implementations of `nms` and `qnms` on import and fails where they are unknown.
Every Python started with this folder on PYTHONPATH runs this file: it imports nothing heavy until somebody
imports torchvision, and hands on to the next sitecustomize on the path.
"""

import gc
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec

_HERE = __file__.rpartition("/")[0]


class _BeforeTorchvision:
    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(cls)
        from torch.library import Library

        library = Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        cls.library = library  # kept: the operators go when it does


def _next_sitecustomize() -> ModuleSpec | None:
    elsewhere = [folder for folder in sys.path if folder.rstrip("/") != _HERE]
    return PathFinder.find_spec("sitecustomize", elsewhere)


gc.set_threshold(20_000, 20, 100)  # 3,000 modules are imported in each of three processes: seconds less
sys.meta_path.insert(0, _BeforeTorchvision)
_spec = _next_sitecustomize()
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(module_from_spec(_spec))
