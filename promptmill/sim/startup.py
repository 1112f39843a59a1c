"""What the scheduler does before it is ready: load, allocate, capture, and fail in the real one's words."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from promptmill.sim.engine_config import EngineConfig
from promptmill.sim.faults import Fault
from promptmill.sim.logs import Log
from promptmill.sim.memory import Memory, NotEnoughMemory, Plan, plan_memory
from promptmill.sim.model import Vocabulary
from promptmill.sim.text import ModelFiles

_SHARDS = 64


class Crash(Exception):
    """The scheduler fails: a name of `crashes.hit_an_exception` and what its text needs."""

    def __init__(self, name: str, **facts: object) -> None:
        super().__init__(name)
        self.name = name
        self.facts = facts


@dataclass(frozen=True, slots=True)
class Loaded:
    """What serving needs."""

    plan: Plan
    config: EngineConfig
    vocabulary: Vocabulary


def load(
    log: Log, args: dict[str, Any], sim: Any, memory: Memory, files: ModelFiles, faults: Sequence[Fault]
) -> Loaded:
    """Takes --sim-start-s. Raises Crash; does not return where a fault says so."""
    start = {fault.name: fault for fault in faults if fault.at_start}
    started = time.monotonic()

    def pause(until_share: float) -> None:
        left = started + sim.sim_start_s / sim.sim_speed * until_share - time.monotonic()
        time.sleep(max(0.0, left))

    facts = {"gpu": memory.gpu, "free": 0.42, "used": memory.gpu - 0.42, "ninety": memory.gpu * 0.9}
    _fail(start, ("import", "nccl", "shm", "dist-port"), facts)
    log.info("Init parallel begin.")
    log.info("Init parallel ends. elapsed=0.04 s")
    _fail(start, ("unbalanced",), facts | {"free": memory.gpu * 0.71})
    log.info(f"Load weight begin. avail mem={memory.gpu - (1.0 if memory.is_gpu else 0.0):.2f} GB")
    _load_weights(log, start, sim, facts)
    vocabulary = files.vocabulary(memory, sim)
    pause(0.6)
    architecture = (files.config.get("architectures") or [memory.architecture])[0]
    plan = _allocate(log, args, memory, start, architecture, sim.sim_start_s * 0.6)
    _host_cache(log, args, memory, plan, start)
    if memory.is_gpu and plan.graph_gib:
        log.graphs_begin(plan.headroom_gib + plan.graph_gib)
        graph_flag = "--cuda-graph-max-bs" if log.old else "--cuda-graph-max-bs-decode"
        if plan.headroom_gib < 0:
            start["graph-oom"] = Fault("graph-oom", at_start=True)
        _fail(start, ("graph-oom",), facts | {"graph_flag": graph_flag})
        pause(0.9)
        log.graphs_end(plan, sim.sim_start_s * 0.3)
    elif not log.old:
        log.info(
            "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
            "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
        )
    config = _engine_config(args, files, memory, plan)
    _capacity(log, args, config, plan)
    pause(1.0)
    return Loaded(plan, config, vocabulary)


def _load_weights(log: Log, start: dict[str, Fault], sim: Any, facts: dict[str, float]) -> None:
    if "killed" in start:
        os.kill(os.getpid(), signal.SIGKILL)
    if "bus" in {fault.argument for fault in start.values()}:
        os.kill(os.getpid(), signal.SIGBUS)
    while "hang" in start:
        signal.pause()
    _fail(start, ("oom", "disk"), facts)
    if slow := start.get("slow-progress"):
        for done in range(_SHARDS):
            log.raw(
                f"Multi-thread loading shards: {100 * done // _SHARDS:3d}% Completed | {done}/{_SHARDS} "
                f"[00:00<?, ?it/s]"
            )
            time.sleep(slow.seconds(600) / _SHARDS / sim.sim_speed)
    log.raw("\nMulti-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]")
    log.raw("Multi-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 47.04it/s]")


def _allocate(
    log: Log,
    args: dict[str, Any],
    memory: Memory,
    start: dict[str, Fault],
    architecture: str,
    elapsed_s: float,
) -> Plan:
    try:
        plan = plan_memory(memory, args)
    except NotEnoughMemory as error:
        failed, plan = str(error), plan_memory(memory, args | {"mem_fraction_static": 0.99})
        log.weights(plan, architecture, elapsed_s)
        if log.old:
            failed = (
                "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
                f"Current value: self.server_args.mem_fraction_static={args['mem_fraction_static']}"
            )
        raise Crash("kv", text=failed if log.old else f"ValueError: {failed}") from None
    log.weights(plan, architecture, elapsed_s)
    if "kv" in start:
        above = min(0.99, args["mem_fraction_static"] + 0.02)
        text = (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under "
            f"--mem-fraction-static={args['mem_fraction_static']:g}. Raise "
            f"--mem-fraction-static above {above:g} (minimum viable = 1 - available/pre = "
            f"{above - 0.0006:.4f}). "
            "If using speculative decoding, draft weights are now counted."
        )
        raise Crash("kv", text=text)
    if args["kv_cache_dtype"].startswith("fp8"):
        log.info(
            "Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0. "
            "This may lead to less accurate results!"
        )
    log.kv_cache(plan, plan.kv_tokens)
    log.info(f"Memory pool end. avail mem={plan.headroom_gib + plan.graph_gib:.2f} GB")
    return plan


def _host_cache(log: Log, args: dict[str, Any], memory: Memory, plan: Plan, start: dict[str, Fault]) -> None:
    """The hierarchical cache: its size is per rank, and all ranks share one host."""
    if not args["enable_hierarchical_cache"] and "host-memory" not in start:
        return
    size = float(args["hicache_size"] or plan.kv_gib * (args["hicache_ratio"] or 2.0))
    if "host-memory" in start or size * args["tp_size"] > memory.host:
        free = min(size / 2, max(0.0, memory.host - size * (args["tp_size"] - 1)))
        raise Crash("host-memory", asked=size, host=free)
    if log.old:
        log.info(f"Allocating {size:.2f} GB host memory for hierarchical KV cache.")
    else:
        tokens = int(size / plan.kv_gib * plan.kv_tokens)
        log.info(f"Allocating kv hierarchical KV host pool: {tokens} tokens, {size:.2f} GB host memory.")


def _engine_config(args: dict[str, Any], files: ModelFiles, memory: Memory, plan: Plan) -> EngineConfig:
    context = args["context_length"] or files.config.get("max_position_embeddings") or memory.context_tokens
    default_running = min(max(plan.kv_tokens * 512 // context, 2048), 4096)
    return EngineConfig(
        kv_tokens=plan.kv_tokens,
        context_tokens=context,
        max_running=max(1, min(args["max_running_requests"] or default_running, plan.kv_tokens // 2)),
        max_queued=args["max_queued_requests"],
        chunk_tokens=args["chunked_prefill_size"],
        max_prefill_tokens=args["max_prefill_tokens"],
        conservativeness=args["schedule_conservativeness"],
        radix=not args["disable_radix_cache"],
    )


def _capacity(log: Log, args: dict[str, Any], config: EngineConfig, plan: Plan) -> None:
    if config.kv_tokens < config.context_tokens and not log.old:
        log.error(
            f"KV pool holds {config.kv_tokens} tokens, fewer than --context-length {config.context_tokens}. "
            "One full-length request cannot fit, so long requests will be refused or truncated at serving "
            "time. Lower --context-length, raise --mem-fraction-static, or free memory taken before the pool "
            "is sized."
        )
    log.info(
        f"max_total_num_tokens={config.kv_tokens}, chunked_prefill_size={config.chunk_tokens}, "
        f"max_prefill_tokens={config.max_prefill_tokens}, max_running_requests={config.max_running}, "
        f"context_len={config.context_tokens}, available_{'gpu' if log.gpu else 'cpu'}_mem="
        f"{plan.headroom_gib:.2f} GB"
    )
    if not log.old:
        log.info(
            "Tree cache initialized: source=default impl=UnifiedRadixCache hybrid_swa=False hybrid_ssm=False "
            f"hicache_attached={args['enable_hierarchical_cache']}"
        )


def _fail(start: dict[str, Fault], names: tuple[str, ...], facts: dict[str, Any]) -> None:
    for name in names:
        if name in start and start[name].argument != "bus":
            raise Crash(name, **facts)
