"""Where the real SGLang for tests lies, and how it starts on a CPU. `make .venv-sglang/.made` builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_VENV = _HERE.parents[1] / ".venv-sglang"


def _env() -> dict[str, str]:
    return {
        "PYTHONPATH": str(_HERE / "shims"),
        "PYTHONDONTWRITEBYTECODE": "",  # 3,000 modules, three times
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _flags() -> dict[str, str | int | float | bool]:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "context-length": 2048,  # the same for both models
        "max-total-tokens": 8192,
        "mem-fraction-static": 0.1,
        "skip-server-warmup": True,
        "sleep-on-idle": True,  # an idle scheduler takes a whole core otherwise
    }


@dataclass(frozen=True)
class SGLangCpu:
    """A server that can be started: `command` with `flags` and a model, `env` added to what is inherited."""

    python: Path
    smollm2: Path
    """Knows the capital of France; bfloat16, 8 to 15 tokens/s alone."""
    tiny: Path
    """Random text, the same ids every time; 75 tokens/s alone, 700 with 30 in flight. Wants `tiny_flags`."""
    env: dict[str, str] = field(default_factory=_env)
    flags: dict[str, str | int | float | bool] = field(default_factory=_flags)
    """Under SGLang's own names; true is a flag without a value."""
    tiny_flags: dict[str, str | int | float | bool] = field(default_factory=lambda: {"dtype": "float32"})

    @property
    def command(self) -> list[str]:
        return [str(self.python), "-m", "sglang.launch_server"]


def find(venv: Path = _VENV) -> SGLangCpu | None:
    """None where it was not built, or not to the end."""
    found = SGLangCpu(venv / "bin" / "python", venv / "models" / "smollm2", venv / "models" / "tiny")
    built = found.python.exists() and found.smollm2.is_dir() and found.tiny.is_dir()
    return found if built else None
