"""The tokenizer and chat template inside a GGUF file, rebuilt as the files that transformers reads.

transformers' own `gguf_file=` needs torch. Only the byte-level BPE of SmolLM2 is rebuilt here: the rules
before the merges are named in the file (`tokenizer.ggml.pre`), not contained in it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from promptmill.errors import ConfigError

_CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL


def rebuild_tokenizer(gguf: Path, folder: Path) -> Path:
    """Write the tokenizer of `gguf` to `folder`, unless it is there already; returns `folder`.

    Raises ConfigError for a tokenizer of another family.
    """
    if (folder / "tokenizer_config.json").is_file():
        return folder
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ConfigError("reading a GGUF model needs the package gguf; install promptmill[cpu].") from None
    fields = GGUFReader(gguf).fields

    def get(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    family = (get("tokenizer.ggml.model"), get("tokenizer.ggml.pre"))
    if family != ("gpt2", "smollm"):
        raise ConfigError(
            f"model {gguf}: its tokenizer ({family[0]}, {family[1]}) cannot be rebuilt; "
            "set model_path to a folder with the model's tokenizer files."
        )
    tokens: list[str] = get("tokenizer.ggml.tokens")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        tokenizer = _build(tokens, get("tokenizer.ggml.merges"), get("tokenizer.ggml.token_type"))
        tokenizer.save(str(scratch / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[get("tokenizer.ggml.bos_token_id")],
            "eos_token": tokens[get("tokenizer.ggml.eos_token_id")],
            "chat_template": get("tokenizer.chat_template"),
            "model_max_length": get("llama.context_length"),
            "clean_up_tokenization_spaces": False,
        }
        (scratch / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        with suppress(OSError):  # it is there: another process was faster
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _build(tokens: list[str], merges: list[str], kinds: list[int]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer
