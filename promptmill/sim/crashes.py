"""The words of a failing server: tracebacks cut to what a log parser can tell them by."""

from __future__ import annotations

from collections.abc import Mapping

_SCHEDULER = "site-packages/sglang/srt/managers/scheduler.py"
_START = ((_SCHEDULER, 6362, "run_scheduler_process"), (_SCHEDULER, 568, "__init__"))
_LOOP = (
    (_SCHEDULER, 6368, "run_scheduler_process"),
    (_SCHEDULER, 2010, "run_event_loop"),
    (_SCHEDULER, 6215, "dispatch_event_loop"),
    (_SCHEDULER, 2109, "event_loop_overlap"),
)
_FORWARD = (
    (_SCHEDULER, 4704, "run_batch"),
    ("site-packages/sglang/srt/managers/tp_worker.py", 675, "forward_batch_generation"),
    ("site-packages/sglang/srt/model_executor/model_runner.py", 1860, "forward"),
)

_CUDA_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.75 GiB. GPU 0 has a total capacity of "
    "{gpu:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has "
    "{used:.2f} GiB memory in use. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
_ERRORS = {
    "oom": _CUDA_OOM,
    "graph-oom": (
        "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a "
        "total capacity of {gpu:.2f} GiB of which {free:.2f} GiB is free.\nPossible solutions:\n"
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
        "2. set {graph_flag} to a smaller value (e.g., 16)\n"
        "3. disable torch compile by not using --enable-torch-compile\n"
        "4. disable CUDA graph by --disable-cuda-graph. (Not recommended. Huge performance loss)\n"
        "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose "
    ),
    "kv": "{text}",
    "unbalanced": (
        "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
        "pre_model_load_memory={free:.2f}, local_gpu_memory={gpu:.2f}, local_gpu_memory * 0.9={ninety:.2f}"
    ),
    "nccl": (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
        "NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), "
        "NCCL version 2.28.9\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
    ),
    "shm": (
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/"
        "ProcessGroupNCCL.cpp:3690, unhandled system error, NCCL version 2.28.9\nLast error:\n"
        "Error while creating shared memory segment /dev/shm/nccl-9oNLGt (size 33030528)"
    ),
    "host-memory": (
        "ValueError: Not enough host memory available. Requesting {asked:.2f} GB but only have {host:.2f} GB "
        "free. Please reduce the size of the hierarchical cache."
    ),
    "disk": "OSError: [Errno 28] No space left on device",
    "import": "ImportError: libcudart.so.13: cannot open shared object file: No such file or directory",
    "dist-port": "RuntimeError: Port is already in use: the port 34567 is not available in 30 seconds.",
    "oov": "IndexError: index out of range in self",
    "kv-oom": (
        "RuntimeError: Prefill out of memory. Try to lower your batch size.\nTry to allocate 8192 tokens.\n"
        "Available tokens: 5120\nself.token_to_kv_pool_allocator.available_size()=5120\n"
        "self.tree_cache.evictable_size()=0"
    ),
    "illegal": (
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
        "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
    ),
    "leak": (
        "ValueError: token_to_kv_pool_allocator memory leak detected! available_size=5120, evictable_size=0, "
        "protected_size=0, self.max_total_num_tokens={kv_tokens}"
    ),
}

NCCL_ABORT = (
    "[rank0]:[E1130 02:55:32.000000000 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=48213, OpType=ALLREDUCE, NumelIn=57344, NumelOut=57344, "
    "Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
    "terminate called after throwing an instance of 'c10::DistBackendError'"
)


def hit_an_exception(name: str, at_start: bool, facts: Mapping[str, object]) -> str:
    """The log message of a scheduler that failed in this way."""
    frames = _START if at_start else (*_LOOP, *_FORWARD)
    lines = "".join(f'  File "{file}", line {line}, in {function}\n' for file, line, function in frames)
    error = _ERRORS[name].format(**facts)
    return f"Scheduler hit an exception: Traceback (most recent call last):\n{lines}{error}\n"


def bad_model(path: str) -> str:
    """What a model that is nowhere makes the main process print."""
    error = (
        f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'. "
        "Use `repo_type` argument if needed."
    )
    return (
        "Traceback (most recent call last):\n"
        '  File "site-packages/transformers/utils/hub.py", line 537, in cached_files\n'
        '  File "site-packages/huggingface_hub/utils/_validators.py", line 133, in validate_repo_id\n'
        f"huggingface_hub.errors.HFValidationError: {error}\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        "Traceback (most recent call last):\n"
        '  File "site-packages/sglang/launch_server.py", line 29, in run_server\n'
        '  File "site-packages/sglang/srt/server_args.py", line 277, in resolve_once\n'
        '  File "site-packages/transformers/utils/hub.py", line 595, in cached_files\n'
        f"OSError: {error}\n"
    )


def bad_kv_dtype(dtype: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "site-packages/sglang/launch_server.py", line 29, in run_server\n'
        '  File "site-packages/sglang/srt/server_args.py", line 277, in resolve_once\n'
        "ValueError: TensorRT-LLM MLA backend only supports kv-cache-dtype of fp8_e4m3, bf16, bfloat16, or "
        f"auto; got {dtype}.\n"
    )


def died_during_init(exit_code: int) -> str:
    return (
        "Traceback (most recent call last):\n"
        '  File "site-packages/sglang/launch_server.py", line 29, in run_server\n'
        '  File "site-packages/sglang/srt/entrypoints/engine.py", line 1290, in _wait_for_scheduler_ready\n'
        f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {exit_code}). "
        "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. "
        "Run `dmesg -T | grep -i oom` to check.\n"
    )
