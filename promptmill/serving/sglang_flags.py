"""SGLang's flags: full names, and what they are called in which version. Pure.

Read from the wheels 0.5.9 and 0.5.23. Between the two nobody looked: there a flag is passed as it is written.
argparse takes unique prefixes, so `--tp` works until the day that another flag begins with it: what leaves
here has its full name.
"""

from __future__ import annotations

from collections.abc import Mapping

from promptmill.errors import ConfigError
from promptmill.settings import FlagValue

Version = tuple[int, ...]
KEPT_FREE = 2
"""Tokens at the context's end: an answer that would fill it to the last is clipped without a word."""
OLD: Version = (0, 5, 9)
NEW: Version = (0, 5, 23)

_FULL_NAMES = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "dp": "dp-size",
    "data-parallel-size": "dp-size",
    "ep": "ep-size",
    "expert-parallel-size": "ep-size",
    "pp": "pp-size",
    "pipeline-parallel-size": "pp-size",
    "enable-hicache": "enable-hierarchical-cache",
}
_OURS = {
    "model-path": "model or model_path",
    "revision": "model_revision",
    "port": "server.port",
    "served-model-name": "nothing: promptmill gives each life its own",
    "api-key": "nothing: promptmill gives each life a key of its own, and argv is for everybody to read",
    "admin-api-key": "nothing: argv is for everybody to read",
    "config": "the flags in server.flags; promptmill hands its key over in a file of its own",
    "trust-remote-code": "trust_remote_code",
    "stream-interval": "server.stream_interval",
    "incremental-streaming-output": "nothing: it is always on",
    "stream-output": "nothing: it is always on",
    "enable-metrics": "nothing: it is always on",
    "skip-tokenizer-init": "nothing: the gate compares what the server's tokenizer renders",
}
_RENAMED = {
    # up to 0.5.9: from 0.5.23
    "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
    "cuda-graph-bs": "cuda-graph-bs-decode",
    "fp4-gemm-backend": "fp4-gemm-runner-backend",
    "fp8-gemm-backend": "fp8-gemm-runner-backend",
}
_KV_DTYPES = {
    OLD: ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"),
    NEW: ("auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16"),
}


def parse_version(text: str) -> Version | None:
    """`0.5.23.post1` → (0, 5, 23); None where there is none."""
    parts = text.split(".")[:3]
    if len(parts) < 3 or not all(part[:1].isdigit() for part in parts):
        return None
    return tuple(int("".join(c for c in part if c.isdigit())) for part in parts)


def for_version(flags: Mapping[str, FlagValue], version: Version | None) -> dict[str, FlagValue]:
    """The flags of a profile under the names that `version` knows; None stands for the newest known one.

    Raises ConfigError for flags that are promptmill's own, for two names of one flag, and for a KV cache type
    that the version does not have: another type is never chosen instead, because it changes the data.
    """
    renamed: dict[str, FlagValue] = {}
    for written, value in flags.items():
        name = canonical(written)
        if name in _OURS:
            raise ConfigError(f"server.flags.{written}: promptmill sets this itself; set {_OURS[name]}.")
        name = _name_in(name, version or NEW)
        if name in renamed:
            raise ConfigError(f"server.flags.{written}: {name} is set twice.")
        renamed[name] = value
    _check_kv_dtype(renamed, version or NEW)
    return renamed


def canonical(flag: str) -> str:
    """The full name, without dashes in front."""
    name = flag.lstrip("-").replace("_", "-")
    return _FULL_NAMES.get(name, name)


def streaming_flags(version: Version | None, interval: int) -> dict[str, FlagValue]:
    """New tokens only in each event, and an event every `interval` tokens."""
    deltas = "stream-output" if version is not None and version <= OLD else "incremental-streaming-output"
    return {"stream-interval": interval, deltas: True}


def _name_in(name: str, version: Version) -> str:
    if version >= NEW:
        return _RENAMED.get(name, name)
    if version <= OLD:
        return {new: old for old, new in _RENAMED.items()}.get(name, name)
    return name


def _check_kv_dtype(flags: Mapping[str, FlagValue], version: Version) -> None:
    dtype = flags.get("kv-cache-dtype", "auto")
    known = _KV_DTYPES[NEW] if version >= NEW else _KV_DTYPES[OLD] if version <= OLD else None
    if known is not None and dtype not in known:
        raise ConfigError(
            f"server.flags.kv-cache-dtype: SGLang {'.'.join(map(str, version))} has no {dtype!r}; "
            f"it has: {', '.join(known)}. Another type gives other answers, so the choice is yours."
        )
