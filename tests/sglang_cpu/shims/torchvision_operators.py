"""Declares two operators right before torchvision is imported, which cannot load its own beside a CPU torch.

torchvision registers fake implementations of `nms` and `qnms` on import and fails where they are unknown.
"""

import sys


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


sys.meta_path.insert(0, _BeforeTorchvision)
