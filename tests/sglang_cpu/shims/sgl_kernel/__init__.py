"""Stands in for the wheel `sglang-kernel`, which holds CUDA code only: every name imports, no call works.

SGLang asks for the version at start-up and imports names wherever a GPU path is defined; on a CPU it then
takes its torch paths and calls none of them.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.10"


class _Name:
    """Any function, class or object of the package."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, *_: object, **__: object) -> object:
        raise NotImplementedError(f"{self._path}: this is a shim without kernels (tests/sglang_cpu)")

    def __getattr__(self, name: str) -> "_Name":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._path}.{name}")

    def __or__(self, _: object) -> "_Name":  # `ScalarType | None` in an annotation
        return self

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<shim {self._path}>"


class _Submodule(ModuleType):
    def __getattr__(self, name: str) -> _Name:
        return _lookup(self.__name__, name)


class _Finder:
    """Makes every `sgl_kernel.…` a package, so that what lies below it imports too."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder, is_package=True) if name.startswith(f"{__name__}.") else None

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        pass


def _lookup(module: str, name: str) -> _Name:
    if name.startswith("__"):  # what the import system and inspect look for
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _Name(f"{module}.{name}")


def __getattr__(name: str) -> _Name:
    return _lookup(__name__, name)


sys.meta_path.append(_Finder)
