"""The lines of SGLang's log that tell something, as data: one line in, one event out.

SGLang renamed three of these lines in nine months. So every number is optional, fields may come in any order,
and an unknown line is no error. The line of the server's arguments holds its API key: named fields are read
from it and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | float | str

UNREAD = ("INFO:  ", "Receive: ", "Finish: ")
"""How messages begin that say nothing of the server: uvicorn's, and --log-requests, which quotes prompts."""

_PREFIX = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?((?: [A-Z][A-Z_]*\d+)*)\] ?")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One known line. `rank` is as its prefix has it, such as "DP0 TP3", or empty."""

    kind: str
    rank: str
    values: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one kind of line looks."""

    kind: str
    needle: str
    """A line without it is not of this kind."""
    versions: str
    example: str
    fields: Mapping[str, str] = field(default_factory=dict)
    """Each is looked for by itself; it holds one of %d, %f and %s."""
    first: bool = False
    """The message begins with the needle."""


_AVAILABLE = {"available_gib": "avail mem=%f"}
_BATCH = {
    "running": "#running-req: %d",
    "queued": "#queue-req: %d",
    "usage": "(?<!swa )(?:full )?token usage: %f",
    "swa_usage": "swa token usage: %f",
    "mamba_usage": "mamba usage: %f",
}
_ARGUMENTS = {
    "mem_fraction_static": "%f",
    "kv_cache_dtype": "%s",
    "chunked_prefill_size": "%d",
    "context_length": "%d",
    "max_running_requests": "%d",
    "cuda_graph_max_bs": "%d",
}
_LIMITS = (
    "max_total_num_tokens",
    "chunked_prefill_size",
    "max_prefill_tokens",
    "max_running_requests",
    "context_len",
)

SHAPES: tuple[Shape, ...] = (
    Shape("args", "server_args=", "0.5.9 ServerArgs(…), 0.5.23 {…}",
          "server_args={'model_path': 'tiny', 'chunked_prefill_size': 4096}",
          {name: rf"\b{name}(?:_decode)?'?[=:] ?'?{end}" for name, end in _ARGUMENTS.items()}),
    Shape("weights_begin", "Load weight begin", "all", "Load weight begin. avail mem=93.50 GB", _AVAILABLE),
    Shape("weights_end", "Load weight end", "all; 0.5.23 may name a quant",
          "Load weight end. elapsed=17.04 s, type=LlamaForCausalLM, avail mem=28.23 GB, mem usage=16.29 GB.",
          {**_AVAILABLE, "elapsed_s": "elapsed=%f", "model_class": r"\btype=%s",
           "weights_gib": "mem usage=%f"}),
    Shape("fp8_without_scales", "no scaling factors provided", "all",
          "Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0."),
    Shape("kv_pool", "#tokens: ", "0.5.9 without dtype; 0.5.23 also after the capture, with avail mem",
          "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1500, K size: 5.00 GB, V size: 5.00 GB",
          {**_AVAILABLE, "dtype": r"dtype: (?:torch\.)?%s", "tokens": "#tokens: %d",
           "kv_gib": "KV size: %f", "k_gib": r"\bK size: %f", "v_gib": r"\bV size: %f"}),
    Shape("memory_pool", "Memory pool end", "all", "Memory pool end. avail mem=8.38 GB", _AVAILABLE),
    Shape("graph_begin", "graph begin", "0.5.23 Capture target decode CUDA graph …",
          "Capture cuda graph begin. This can take up to several minutes. avail mem=8.22 GB", _AVAILABLE),
    Shape("graph_end", "graph end", "0.5.23 elapsed=, before it Time elapsed:",
          "Capture cuda graph end. Time elapsed: 45.10 s. mem usage=2.10 GB. avail mem=0.82 GB.",
          {**_AVAILABLE, "elapsed_s": "elapsed(?:=|: )%f", "graph_gib": "mem usage=%f"}),
    Shape("capacity", "max_total_num_tokens=", "all; one a DP rank",
          "max_total_num_tokens=376029, chunked_prefill_size=8192, available_gpu_mem=3.52 GB",
          {name: f"{name}=%d" for name in _LIMITS}
          | {"available_gib": "available_gpu_mem=%f", "available_cpu_gib": "available_cpu_mem=%f"}),
    Shape("kv_below_context", "KV pool holds", "≥ 0.5.10",
          "KV pool holds 1500 tokens, fewer than --context-length 2048. One full-length request cannot fit",
          {"kv_tokens": "holds %d", "context_len": "--context-length %d"}),
    Shape("ready", "The server is fired up", "all", "The server is fired up and ready to roll!"),
    Shape("prefill", "Prefill batch", "0.5.9 without #pending-token, graph after throughput",
          "Prefill batch, #new-seq: 5, #new-token: 8192, #cached-token: 15, token usage: 0.13",
          {**_BATCH, "new_requests": "#new-seq: %d", "new_tokens": "#new-token: %d",
           "cached_tokens": "#cached-token: %d", "pending_tokens": "#pending-token: %d",
           "tokens_per_s": r"input throughput \(token/s\): %f"}, first=True),
    Shape("decode", "Decode batch", "hybrid models: full and swa tokens; with a drafter: accept len",
          "Decode batch, #running-req: 64, #token: 12702, token usage: 0.47, cuda graph: True",
          {**_BATCH, "tokens": "#(?:full )?token: %d", "swa_tokens": "#swa token: %d",
           "accept_len": "accept len: %f", "accept_rate": "accept rate: %f",
           "tokens_per_s": r"gen throughput \(token/s\): %f"}, first=True),
    Shape("retraction", "Retract requests", "all", "KV cache pool is full. Retract requests. "
          "#retracted_reqs: 3, #new_tokens_gained: 12000, #new_token_ratio: 0.1200 -> 0.4300",
          {"requests": "#retracted_reqs: %d", "tokens": "#new_tokens_gained: %d",
           "ratio": "ratio: [^>]*> ?%f"}),
    Shape("last_request_oom", "aborted last request", "all",
          "retract_decode: aborted last request 7f due to OOM"),
    Shape("hicache", "host memory for hier", "≤ 0.5.9, each rank",
          "Allocating 120.00 GB host memory for hierarchical KV cache.", {"host_gib": "Allocating %f GB"}),
    Shape("hicache", "hierarchical KV host pool", "0.5.23",
          "Allocating kv hierarchical KV host pool: 750000 tokens, 24.60 GB host memory.",
          {"tokens": "pool: %d", "host_gib": "%f GB host"}),
    Shape("hicache", "than the device pool", "0.5.23",
          "HiCache kv host pool (1000) is smaller than the device pool (2000)"),
    Shape("health_failed", "Health check failed", "all",
          "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds.",
          {"seconds": "last %d seconds"}),
    Shape("scheduler_exception", "hit an exception", "2025 also TpModelWorkerClient",
          "Scheduler hit an exception: Traceback (most recent call last):"),
    Shape("child_exit", "crashed with exit code", "≥ 0.5.10",
          "Subprocess scheduler_0 (pid=1493) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
          {"process": "Subprocess %s", "exit_code": "exit code %d"}),
    Shape("child_exit", "died during initialization", "≥ 0.5.10",
          "Rank 0 scheduler died during initialization (exit code: -9).",
          {"process": "Rank %s", "exit_code": "exit code: %d"}),
    Shape("init_failed", "Initialization failed", "all", "Initialization failed. warmup error: Traceback"),
    Shape("sigquit", "SIGQUIT received", "all, serving", "SIGQUIT received. signum=None, frame=None."),
    Shape("sigquit", "eceived sigquit from", "all, start; 2025 also serving",
          "Received sigquit from a child process. It usually means the child failed."),
    Shape("sigterm", "SIGTERM received", "all", "SIGTERM received. signum=None frame=None. Draining"),
    Shape("watchdog", "atchdog timeout (self.", "2025 without Scheduler and soft",
          "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
          {"timeout_s": "dog_timeout=%f", "soft": "soft=%s"}),
    Shape("kill_process_tree", "kill_process_tree called", "≥ 0.5.10",
          "kill_process_tree called: parent_pid=1000, include_parent=True, pid=1000",
          {"include_parent": "include_parent=%s"}),
)  # fmt: skip

_TYPES: dict[str, type[int] | type[float] | type[str]] = {"%d": int, "%f": float, "%s": str}
_FORMS = {
    "%d": r"(-?\d{1,18})",  # int() refuses thousands of digits
    "%f": r"(-?\d{1,18}(?:\.\d{1,18})?(?:e[-+]?\d{1,2})?)",
    "%s": r"([\w.\-/]{1,80})",
}
_Reader = tuple[str, re.Pattern[str], type[int] | type[float] | type[str]]


def _reader(name: str, text: str) -> _Reader:
    end = next(end for end in _FORMS if end in text)
    return name, re.compile(text.replace(end, _FORMS[end])), _TYPES[end]


_READERS = [(shape, [_reader(*item) for item in shape.fields.items()]) for shape in SHAPES]


def parse_line(line: str) -> LogEvent | None:
    """The event of one line, or None for a line that tells nothing. Never raises."""
    return parse_message(*split_line(line.rpartition("\r")[2] or line))


def split_line(line: str) -> tuple[str, str]:
    """Rank and message of a line, without colours; what stands before a prefix is a progress bar."""
    line = without_ansi(line)
    found = _PREFIX.search(line)
    return (found[1].strip(), line[found.end() :]) if found else ("", line)


def without_ansi(text: str) -> str:
    return _ANSI.sub("", text) if "\x1b" in text else text


def parse_message(rank: str, message: str) -> LogEvent | None:
    """As parse_line, of a line that is split."""
    if message.startswith(UNREAD):
        return None
    for shape, readers in _READERS:
        if shape.needle in message and (not shape.first or message.startswith(shape.needle)):
            found = [(name, kind, pattern.search(message)) for name, pattern, kind in readers]
            values = {name: kind(match[1]) for name, kind, match in found if match}
            return LogEvent(shape.kind, rank, {name: v for name, v in values.items() if v != "None"})
    return None
