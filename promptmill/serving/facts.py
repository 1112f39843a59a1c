"""What a healthy server says of itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
    """None is what the server does not tell."""

    served_model_name: str
    slots: int | None = None
    """Requests that it works on at a time."""
    context_tokens: int | None = None
    """Room for one prompt and its answer."""
    kv_tokens: int | None = None
    """KV tokens of one data-parallel rank: a request lies in one."""
    capacity_tokens: int | None = None
    """KV tokens of all ranks."""
    gpus: int | None = None
    headroom_gib: float | None = None
    """GPU memory that was left when it was ready, on the fullest GPU."""
    version: str | None = None
    kv_dtype: str | None = None
    mem_fraction_static: float | None = None
    startup_s: float = 0.0
    canary: str = ""
    """What it answered at the gate."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
