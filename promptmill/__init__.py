"""promptmill: prompts in, a training dataset out, with a model that you serve yourself."""

import ctypes
import os
from contextlib import suppress

__version__ = "0.1.0"

_M_ARENA_MAX = -8

# Before Arrow is imported: its own allocator keeps what was used once, 35 MB for as long as a run takes.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
# Before there are threads: malloc gives each an arena of its own, and what is allocated in one thread and
# freed in another leaves holes there, 30 MB in a run. Our threads take turns anyway.
with suppress(AttributeError):  # another libc than GNU's
    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
