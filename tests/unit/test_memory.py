"""What the process asks of malloc, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

_THREADS_ALLOCATE = """
import ctypes, threading
from promptmill.memory import share_one_arena
share_one_arena()
together, held = threading.Barrier(4), []
def allocate():
    together.wait()
    held.append([bytes(1000) for _ in range(100)])
    together.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""


def test_arrow_gives_memory_back() -> None:
    code = "import promptmill.store.segments, pyarrow; print(pyarrow.default_memory_pool().backend_name)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "system"


def test_threads_share_one_arena() -> None:
    command = [sys.executable, "-c", _THREADS_ALLOCATE]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert ("Arena 0" in told, "Arena 1" in told) == (True, False)
