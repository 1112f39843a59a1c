"""A model of GPU memory: what `--mem-fraction-static` leaves for the KV cache and for everything else.

Fitted to two runs of Kimi-K2.5 on 96 GB cards: a fraction of 0.88 gave 159K KV tokens in bf16 and 5.47 GB
beside them, 0.90 gave 376K in fp8 and 3.52 GB, 0.93 left 0.82 GB and died of its first full prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Memory:
    """One GPU (or, without GPUs, the host's memory), in GiB."""

    gpu: float
    weights: float
    reserve: float
    prefill: float
    graph: float
    host: float
    kv_bytes_per_token: float
    is_gpu: bool = True
    context_tokens: int = 262_144
    vocab: int = 163_840
    eos: tuple[int, ...] = (163_586,)
    think_open: tuple[int, ...] = (163_606,)
    think_close: tuple[int, ...] = (163_607,)
    model_type: str = "kimi_k25"
    architecture: str = "KimiK25ForConditionalGeneration"

    @staticmethod
    def help(name: str) -> str:
        """What one of the numbers is."""
        return {
            "gpu": "memory of one GPU",
            "weights": "weights on one GPU",
            "reserve": "taken outside the static fraction: CUDA context, graphs",
            "prefill": "activations of a full prefill chunk under load",
            "graph": "CUDA graphs up to a batch of 256, part of the reserve",
            "host": "host memory for the hierarchical cache",
        }[name]


PRESETS = {
    "kimi-96gb": Memory(94.97, 73.17, 5.9, 2.0, 2.1, 1500.0, 70_272.0),
    "h200": Memory(140.0, 73.17, 5.9, 2.0, 2.1, 2000.0, 70_272.0),
    "cpu": Memory(
        20.57, 0.25, 0.0, 0.0, 0.0, 20.57, 23_040.0, False, 32_768, 32_000, (2,), (31_990,), (31_991,),
        "llama", "LlamaForCausalLM",
    ),
}  # fmt: skip


class NotEnoughMemory(Exception):
    """The weights leave nothing for the KV cache; the text is the server's own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How memory is divided, in GiB; `kv_tokens` before --max-total-tokens caps it."""

    memory: Memory
    fraction: float
    kv_tokens: int
    kv_gib: float
    graph_gib: float
    headroom_gib: float
    """Free once everything is allocated; without a GPU the host's free memory."""
    kv_dtype: str

    @property
    def after_weights_gib(self) -> float:
        return self.memory.gpu - self.memory.weights - (1.0 if self.memory.is_gpu else 0.0)

    def full_prefill_fits(self, chunk_tokens: int) -> bool:
        """Whether the activations of one prefill chunk find room beside everything else."""
        if not self.memory.is_gpu:
            return True
        return self.headroom_gib >= self.memory.prefill * max(chunk_tokens, 1) / 8192


def memory_of(sim: Any, device: str | None) -> Memory:
    """The preset with the `--sim-*-gib` flags over it."""
    memory = PRESETS["cpu" if device == "cpu" else sim.sim_gpu]
    given = {f.name: getattr(sim, f"sim_{f.name}_gib", None) for f in fields(Memory)}
    given["kv_bytes_per_token"] = sim.sim_kv_bytes_per_token
    if given["gpu"] is not None and device != "cpu":
        memory = memory if memory.is_gpu else PRESETS["kimi-96gb"]
    return replace(memory, **{key: value for key, value in given.items() if value is not None})


def plan_memory(memory: Memory, args: dict[str, Any]) -> Plan:
    """Divide it by the server's arguments. Raises NotEnoughMemory as the real server does."""
    fraction = args["mem_fraction_static"]
    bytes_per_token, dtype = memory.kv_bytes_per_token, "torch.bfloat16"
    if args["kv_cache_dtype"].startswith("fp8"):
        bytes_per_token /= 2
        dtype = "torch.float8_e5m2" if args["kv_cache_dtype"] == "fp8_e5m2" else "torch.float8_e4m3fn"
    elif "fp4" in args["kv_cache_dtype"]:
        bytes_per_token, dtype = bytes_per_token * 0.28, "torch.uint8"
    room = memory.gpu * fraction - memory.weights
    cap = args["max_total_tokens"]
    if room <= 0 and (memory.is_gpu or cap is None):
        minimum = memory.weights / memory.gpu
        raise NotEnoughMemory(
            "Loaded weights leave no GPU memory for the KV cache under "
            f"--mem-fraction-static={fraction:g}. Raise --mem-fraction-static above "
            f"{math.ceil(minimum * 1000) / 1000:g} (minimum viable = 1 - available/pre = {minimum:.4f}). "
            "If using speculative decoding, draft weights are now counted."
        )
    tokens = int(max(room, 0.0) * _GIB / bytes_per_token)
    tokens = min(tokens or cap, cap) if cap is not None else tokens
    graph = memory.graph
    largest = args.get("cuda_graph_max_bs_decode") or args.get("cuda_graph_max_bs")
    if args.get("disable_cuda_graph") or args.get("cuda_graph_backend_decode") == "disabled":
        graph = 0.0
    elif largest:
        graph = memory.graph * min(1.0, largest / 256)
    kv_gib = tokens * bytes_per_token / _GIB
    headroom = memory.gpu * (1 - fraction) - memory.reserve + memory.graph - graph
    headroom += max(room, 0.0) - kv_gib if cap is not None else 0.0
    if not memory.is_gpu:
        headroom = memory.gpu - memory.weights - kv_gib
    return Plan(memory, fraction, tokens, kv_gib, graph, headroom, dtype)
