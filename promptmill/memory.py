"""What is asked of the C library's allocator and of Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_M_ARENA_MAX = -8
_GC_THRESHOLD = (20_000, 20, 20)
"""With 1,000 requests in flight, Python's own takes an eighth of all CPU time, and finds next to nothing: 340
objects in 4,000 answers were in cycles."""


def share_one_arena() -> None:
    """Threads that begin from here on allocate from one arena; what is free now goes back to the kernel.

    An arena a thread is malloc's way, and good for threads that compute side by side, as in tokenizing. In
    the mill they take turns, and what is allocated in one thread and freed in another leaves holes: 30 MB in
    a run. Does nothing on another libc than GNU's.
    """
    with suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.malloc_trim(0)


class RareCollections:
    """While someone is inside, garbage is looked for rarely, and not among what was there before.

    The libraries alone make 150,000 objects at import, which are not looked through again and again.
    """

    def __init__(self) -> None:
        self._entering = threading.Lock()
        self._inside = 0
        self._before = gc.get_threshold()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._entering:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                gc.freeze()
                gc.set_threshold(*_GC_THRESHOLD)
        try:
            yield
        finally:
            with self._entering:
                self._inside -= 1
                if not self._inside:
                    gc.unfreeze()
                    gc.set_threshold(*self._before)


rare_collections = RareCollections()
"""The collector is one for the process, so this is too."""
