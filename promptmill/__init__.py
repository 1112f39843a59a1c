"""promptmill: prompts in, a training dataset out, with a model that you serve yourself."""

import os

__version__ = "0.1.0"

# Before Arrow is imported: its own allocator keeps what was used once, 35 MB for as long as a run takes.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
