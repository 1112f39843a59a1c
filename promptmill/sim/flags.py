"""SGLang's command line and the simulator's own flags, parsed as the real server parses them.

Every server argument that a real 0.5.23 lists in /server_info is a flag here; those that the simulator has no
use for are accepted. A wrong flag ends the process with status 2 and argparse's words. Flags that start with
`--sim-` are the simulator's own.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

from promptmill.sim import faults
from promptmill.sim.memory import PRESETS

_KV_DTYPES = {
    "0.5.23": ["auto", "fp8_e5m2", "fp8_e4m3", "mxfp8", "bf16", "bfloat16", "nvfp4", "fp4_mx_block16"],
    "0.5.9": ["auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1"],
}
_POLICIES = [
    "lpm",
    "random",
    "fcfs",
    "dfs-weight",
    "lof",
    "priority",
    "routing-key",
    "hrrn",
    "shortest-prefill-first",
]
_CHOICES = {
    "schedule_policy": _POLICIES,
    "dtype": ["auto", "half", "float16", "bfloat16", "float", "float32"],
    "hicache_write_policy": ["write_back", "write_through", "write_through_selective"],
}
_ALIASES = {
    "model_path": ["--model"],
    "tp_size": ["--tensor-parallel-size"],
    "dp_size": ["--data-parallel-size"],
    "ep_size": ["--expert-parallel-size", "--ep"],
    "pp_size": ["--pipeline-parallel-size"],
    "enable_hierarchical_cache": ["--enable-hicache"],
}
_OLD_FLAGS: dict[str, Any] = {"cuda_graph_max_bs": None, "cuda_graph_bs": None, "stream_output": False}
_NEW_FLAGS = {
    "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "cuda_graph_bs_decode", "cuda_graph_bs_prefill",
    "cuda_graph_backend_decode", "cuda_graph_backend_prefill", "hicache_host_memory_fraction",
    "retraction_policy", "attn_dp_size",
}  # fmt: skip
_INTS = {
    "max_running_requests", "max_queued_requests", "max_total_tokens", "chunked_prefill_size", "random_seed",
    "prefill_max_requests", "cuda_graph_max_bs_decode", "cuda_graph_max_bs_prefill", "cuda_graph_max_bs",
    "dist_timeout", "nccl_port", "pp_max_micro_batch_size", "speculative_num_steps", "max_mamba_cache_size",
    "speculative_eagle_topk", "speculative_num_draft_tokens",
}  # fmt: skip
_FLOATS = {"mem_fraction_static", "soft_watchdog_timeout", "watchdog_timeout", "hicache_ratio"}
_LISTS = {"cuda_graph_bs_decode", "cuda_graph_bs_prefill", "cuda_graph_bs"}
_SWITCHES = {"enable_multimodal", "enable_lora", "enable_lora_overlap_loading"}


_SHOWN = {
    "model_path", "host", "port", "served_model_name", "context_length", "mem_fraction_static", "tp_size",
    "max_running_requests", "max_total_tokens", "chunked_prefill_size", "schedule_conservativeness",
    "kv_cache_dtype",
}  # fmt: skip
"""Of SGLang's flags, those in --help; the others are SGLang's to explain."""


def server_args(version: str) -> dict[str, Any]:
    """Every argument of that version with its default, in the order of /server_info."""
    defaults: dict[str, Any] = json.loads((Path(__file__).parent / "server_args.json").read_text())
    if _is_old(version):
        defaults = {key: value for key, value in defaults.items() if key not in _NEW_FLAGS} | _OLD_FLAGS
    return defaults


def parse(argv: list[str]) -> tuple[dict[str, Any], argparse.Namespace]:
    """Server arguments as given (not yet resolved), and the `sim_*` ones. Exits with 2 on a wrong flag."""
    argv = _merge_config(argv)
    version = _early(argv, "--sim-version") or "0.5.23"
    defaults = server_args(version)
    parsed = vars(_parser(version, defaults).parse_args(argv))
    args = {key: parsed[key] for key in defaults if key in parsed}
    for key, value in defaults.items():  # internal ones that are no flags
        args.setdefault(key, value)
    args = {key: args[key] for key in defaults}
    args["launch_command"] = shlex.join(argv)
    return args, argparse.Namespace(**{key: value for key, value in parsed.items() if key.startswith("sim_")})


def _parser(version: str, defaults: dict[str, Any]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="launch_server.py",
        usage="%(prog)s --model-path PATH [flags of SGLang and of the simulator]",
        description=f"Takes every flag of SGLang {version}; those that matter most here are listed.",
        epilog=faults.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for key, default in defaults.items():
        if key.startswith("_") or key in {"custom_sigquit_handler", "cuda_graph_config"}:
            continue
        flag = "--" + key.replace("_", "-")
        choices = _KV_DTYPES["0.5.9" if _is_old(version) else "0.5.23"] if key == "kv_cache_dtype" else None
        _add(parser, key, [flag, *_ALIASES.get(key, [])], default, choices or _CHOICES.get(key))
    parser.add_argument("--config")
    _add_sim_flags(parser)
    return parser


def _add(
    parser: argparse.ArgumentParser, key: str, flags: list[str], default: Any, choices: list[str] | None
) -> None:
    hidden: dict[str, Any] = {} if key in _SHOWN else {"help": argparse.SUPPRESS}
    if isinstance(default, bool) or key in _SWITCHES:
        parser.add_argument(*flags, action="store_true", default=default, **hidden)
    elif key in _LISTS:
        parser.add_argument(*flags, type=int, nargs="+", default=default, **hidden)
    elif isinstance(default, list):
        parser.add_argument(*flags, nargs="*", default=default, **hidden)
    elif isinstance(default, dict):
        parser.add_argument(*flags, type=json.loads, default=default, **hidden)
    elif key == "context_length":
        parser.add_argument(*flags, type=_tokens, default=default, **hidden)
    elif isinstance(default, float) or key in _FLOATS:
        parser.add_argument(*flags, type=float, default=default, **hidden)
    elif isinstance(default, int) or key in _INTS:
        parser.add_argument(*flags, type=int, default=default, **hidden)
    else:
        parser.add_argument(
            *flags, type=str, default=default, choices=choices, required=key == "model_path", **hidden
        )


def _add_sim_flags(parser: argparse.ArgumentParser) -> None:
    sim = parser.add_argument_group("simulator")
    add = sim.add_argument
    add("--sim-version", default="0.5.23", help="whose flags, endpoints and log lines: 0.5.23 or 0.5.9")
    add("--sim-speed", type=float, default=1.0, help="simulated seconds a second")
    add("--sim-start-s", type=float, default=0.05, help="simulated seconds until it is ready")
    add("--sim-gpu", choices=sorted(PRESETS), default="cpu", help="a model of GPU memory; cpu has none")
    for name in ("gpu", "weights", "reserve", "prefill", "graph", "host"):
        add(f"--sim-{name}-gib", type=float, help=f"GiB: {PRESETS['kimi-96gb'].help(name)}")
    add("--sim-kv-bytes-per-token", type=float, help="of the KV cache in bf16; fp8 takes half")
    add("--sim-oom-running", type=int, default=8, help="running requests from which a full prefill can fail")
    add("--sim-mean-output", type=float, default=200.0, help="tokens of an answer, on average")
    add("--sim-mean-reasoning", type=float, default=100.0, help="tokens between think markers, on average")
    add("--sim-vocab", type=int, help="size of the vocabulary, where no model says it")
    add("--sim-eos-id", type=_ids, help="end tokens, where no model says them")
    add("--sim-think-open", type=_ids, help="ids of the opening marker, comma-separated")
    add("--sim-think-close", type=_ids, help="ids of the closing marker, comma-separated")
    add("--sim-fault", action="append", default=[], help="see promptmill/sim/faults.py; repeatable")
    add("--sim-fault-file", help="the same, a line each")
    add("--sim-state-dir", help="where launches are counted, for lives=K of a fault")
    add("--sim-no-watchdog", action="store_true", help="nobody notices a dead scheduler, as in 0.5.9")


def _merge_config(argv: list[str]) -> list[str]:
    """The options of `--config FILE` put before those of the command line, so that the latter win."""
    path = _early(argv, "--config")
    if path is None:
        return argv
    merged: list[str] = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if not (match := re.match(r"\s*([\w-]+)\s*:\s*(.*?)\s*(?:#.*)?$", line)):
            continue
        key, value = "--" + match[1].replace("_", "-"), match[2].strip("\"'")
        if value.lower() in {"false", "null", "~", ""}:
            continue
        merged.append(key)
        if value.startswith("["):
            merged += [item.strip(" \"'") for item in value.strip("[]").split(",") if item.strip()]
        elif value.lower() != "true":
            merged.append(value)
    return merged + argv


def _early(argv: list[str], flag: str) -> str | None:
    for index, value in enumerate(argv):
        if value == flag and index + 1 < len(argv):
            return argv[index + 1]
        if value.startswith(flag + "="):
            return value.partition("=")[2]
    return None


def _is_old(version: str) -> bool:
    return version.startswith("0.5.9")


def _tokens(text: str) -> int:
    """`131072` or `128k`."""
    return int(text[:-1]) * 1024 if text[-1:].lower() == "k" else int(text)


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
