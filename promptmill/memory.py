"""What is asked of the C library's allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8


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
