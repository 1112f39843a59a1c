"""What the server says of itself: arguments, capacity, load, metrics."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from promptmill.sim.hub import Hub

_PHASES = ("prefill", "decode", "target_verify", "draft_prefill", "draft_decode", "draft_extend")


def model_info(hub: Hub) -> dict[str, Any]:
    args, config = hub.args, hub.files.config
    info = {
        "model_path": args["model_path"],
        "served_model_name": args["served_model_name"],
        "tokenizer_path": args["tokenizer_path"],
        "is_generation": True,
        "preferred_sampling_params": args["preferred_sampling_params"],
        "weight_version": "default",
        "load_format": args["load_format"],
        "reasoning_parser": args["reasoning_parser"],
        "tool_call_parser": args["tool_call_parser"],
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type", "llama"),
        "architectures": config.get("architectures", ["LlamaForCausalLM"]),
    }
    if not hub.log.old:
        info["embedding"] = json.loads((Path(__file__).parent / "embedding_info.json").read_text())
        info["cache"] = {
            "kv_cache_disabled": False,
            "radix_cache_disabled": args["disable_radix_cache"],
            "chunked_prefill_disabled": args["chunked_prefill_size"] <= 0,
        }
    return info


def server_info(hub: Hub, state: dict[str, Any], startup_s: float) -> dict[str, Any]:
    """All arguments, the API key among them in clear, as the real one gives them."""
    args, ready = dict(hub.args), hub.ready
    launch_command = args.pop("launch_command")
    graphs = dict.fromkeys(_PHASES, 0.0) | {"decode": round(ready["graph_gib"], 3)}
    memory: dict[str, Any] = {
        "weight": round(ready["weights_gib"], 3),
        "kvcache": round(ready["kv_gib"], 3),
        "startup_available": round(ready["headroom_gib"], 3),
        "token_capacity": ready["kv_tokens"],
        "token_capacity_swa": None,
        "graph": graphs,
    }
    timings: dict[str, Any] = {
        "load_weight": startup_s * 0.5,
        "kv_cache_allocation": startup_s * 0.1,
        "scheduler_e2e": startup_s,
        "cuda_graph": graphs,
    }
    if hub.log.old:
        for key in ("startup_available", "token_capacity_swa"):
            del memory[key]
        memory["graph"] = graphs["decode"]
    internal = args | {
        "startup_time": timings,
        "world_size": args["tp_size"] * args["pp_size"],
        "effective_max_running_requests_per_dp": ready["max_running"],
        "last_gen_throughput": state["gen_throughput"],
        "memory_usage": memory,
        "decode_cuda_graph_bs": [],
        "decode_cuda_graph_memory_gb": graphs["decode"],
    }
    internal.pop("custom_sigquit_handler", None)
    return args | {
        "launch_command": launch_command,
        "status": "ready",
        "max_total_num_tokens": ready["kv_tokens"],
        "max_req_input_len": ready["max_input"],
        "startup_time": timings | {"tokenizer_e2e": startup_s},
        "hicache_object_layout": {
            "enabled": args["enable_hierarchical_cache"],
            "backend": None,
            "page_size": 1,
            "hicache_object_layout": {"pools": []},
            "reason": "Hierarchical cache is disabled",
        },
        "kv_events": None,
        "internal_states": [internal],
        "version": hub.sim.sim_version,
        "frontend": "python",
    }


def models(hub: Hub) -> dict[str, Any]:
    card = {
        "id": hub.args["served_model_name"],
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": hub.args["served_model_name"],
        "parent": None,
        "max_model_len": hub.ready["context"],
    }
    return {"object": "list", "data": [card]}


def loads(hub: Hub) -> dict[str, Any]:
    """The scheduler's last snapshot: it stays readable, and old, when the scheduler is stuck or dead."""
    load, ready = hub.load, hub.ready
    used, waiting = load.get("used", 0), load.get("waiting", 0)
    entry = {
        "timestamp": load.get("timestamp", 0.0),
        "dp_rank": 0,
        "num_running_reqs": load.get("running", 0),
        "num_waiting_reqs": waiting,
        "num_waiting_uncached_tokens": load.get("pending", 0),
        "num_used_tokens": used,
        "num_total_tokens": used + load.get("pending", 0),
        "num_active_tokens": used,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": ready["kv_tokens"],
        "max_running_requests": ready["max_running"],
        "token_usage": round(used / ready["kv_tokens"], 4),
        "gen_throughput": load.get("gen_throughput", 0.0),
        "cache_hit_rate": round(load.get("cache_hit_rate", 0.0), 4),
        "utilization": 0.0,
        "total_prefill_uncached_tokens": load.get("uncached", 0),
        "total_prefill_busy_us": load.get("busy_us", 0),
        "decode_moments": [0.0] * 6,
        "memory": {
            "weight_gb": round(ready["weights_gib"], 3),
            "kv_cache_gb": round(ready["kv_gib"], 3),
            "graph_gb": round(ready["graph_gib"], 3),
            "token_capacity": ready["kv_tokens"],
        },
        "disaggregation": {
            "mode": "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": hub.sim.sim_version,
        "accelerator": "NVIDIA" if hub.log.gpu else None,
        "num_accelerators": hub.args["tp_size"],
        "loads": [entry],
    }


def get_load(hub: Hub) -> list[dict[str, Any]]:
    """0.5.9's endpoint."""
    load = hub.load
    running, waiting = load.get("running", 0), load.get("waiting", 0)
    tokens = load.get("used", 0) + load.get("pending", 0)
    return [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting, "num_tokens": tokens}]


def metrics(hub: Hub) -> str:
    """The dozen that matter."""
    load, ready, counts = hub.load, hub.ready, hub.counts
    used = load.get("used", 0)
    ranks = 'engine_type="unified",model_name="{}",moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    labels = ranks.format(hub.args["served_model_name"])
    model = f'engine_type="unified",model_name="{hub.args["served_model_name"]}"'
    gauges: dict[str, float] = {
        "max_total_num_tokens": ready["kv_tokens"],
        "context_len": ready["context"],
        "startup_available_gpu_memory_gb": ready["headroom_gib"],
        "num_running_reqs": load.get("running", 0),
        "num_queue_reqs": load.get("waiting", 0),
        "gen_throughput": load.get("gen_throughput", 0.0),
        "cache_hit_rate": load.get("cache_hit_rate", 0.0),
        "token_usage": used / ready["kv_tokens"],
        "full_token_usage": used / ready["kv_tokens"],
        "num_used_tokens": used,
        "kv_available_tokens": ready["kv_tokens"] - used - load.get("evictable", 0),
        "kv_evictable_tokens": load.get("evictable", 0),
        "new_token_ratio": load.get("ratio", 0.7),
        "num_retracted_reqs": load.get("retracted", 0),
    }
    lines = []
    for name, value in gauges.items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{{{labels}}} {float(value)}"]
    totals = {
        "prompt_tokens_total": counts["prompt"],
        "generation_tokens_total": counts["generated"],
        "cached_tokens_total": counts["cached"],
        "num_requests_total": counts["requests"],
        "num_aborted_requests_total": counts["aborted"],
        "num_retracted_requests_total": load.get("retracted", 0),
    }
    for name, value in totals.items():
        lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{{{model}}} {float(value)}"]
    return "\n".join(lines) + "\n"
