"""What SGLang writes when it dies, and which of it was the cause. Pure.

The table is data. The row of the lowest rank is the root; what follows from something else, what many things
cause and last words rank behind it. Of one rank the earliest line counts, and on one line the upper row.
Numbers in notes are issues of sgl-project/sglang.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

LogPhase = Literal["arguments", "loading", "kv", "graphs", "warmup", "serving"]
"""How far a start came, as its log tells."""

LOG_PHASES: tuple[LogPhase, ...] = ("arguments", "loading", "kv", "graphs", "warmup", "serving")
_STARTING = LOG_PHASES[:-1]

# A server that went on working for this many batch lines did not die of what came before them. It takes some
# seconds to end itself, and meanwhile other data-parallel ranks go on.
_OUTLIVED_AFTER = 50
_SIZE = {"KiB": 2**-20, "MiB": 2**-10, "MB": 2**-10, "TiB": 2**10}
_LINE_CHARS = 500
_SHOWN_CHARS = 200
_STAMP = re.compile(r"(?:\[rank\d+\]:)?\[[EWIF]\d{4} [^\]]*\] ")

ROOT, FOLLOWS, GENERIC, LAST_WORDS, SUICIDE = range(5)


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """One row of the table."""

    name: str
    pattern: re.Pattern[str]
    """Searched in the message of a line, after its prefix."""
    needles: tuple[str, ...]
    """A line without any of them is not searched."""
    note: str
    rank: int = ROOT
    phases: tuple[LogPhase, ...] = LOG_PHASES
    numbers: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """What to read from the line; a size in its second group's unit becomes GiB."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One line that matched."""

    line: str
    number: int
    log_phase: LogPhase
    progress: int
    """Batches that had been logged before it."""


@dataclass(frozen=True, slots=True)
class Match:
    """The first and the last line of one signature."""

    first: Seen
    last: Seen


class LogLike(Protocol):
    """What `classify` reads of a log; logs.LogDigest is one."""

    @property
    def phase(self) -> LogPhase: ...
    @property
    def progress(self) -> int: ...
    @property
    def matches(self) -> Mapping[str, Match]: ...


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a life ended. `line` is the log's own, or empty where the exit status alone tells."""

    signature: str
    line: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    log_phase: str = ""


def _row(
    name: str,
    pattern: str,
    needles: str,
    note: str,
    rank: int = ROOT,
    phases: tuple[LogPhase, ...] = LOG_PHASES,
    **numbers: str,
) -> Signature:
    readers = {key: re.compile(value) for key, value in numbers.items()}
    return Signature(name, re.compile(pattern), tuple(needles.split("|")), note, rank, phases, readers)


_N = r"(\d{1,9}(?:\.\d{1,9})?(?:e-\d{1,2})?)"
_SIZE_N = _N + r" ([KMGT]i?B)"

# name, pattern, needles, where it was seen, rank, phases, numbers
SIGNATURES: tuple[Signature, ...] = (
    _row("kv_budget", r"Not enough memory\. Please try to increase --mem-frac|no GPU memory for the KV cache",
         "Not enough memory|KV cache under", "322, 4330: no room for the KV pool; ≥ 0.5.23 prints a minimum",
         phases=_STARTING, minimum=rf"above {_N}", current=rf"mem[-_]fraction[-_]static={_N}"),
    _row("gpu_oom", r"torch\.(?:cuda\.)?OutOfMemoryError|(?:CUDA|HIP) out of memory|CUDA error: out of memory"
         r"|CUDA_ERROR_OUT_OF_MEMORY|Cuda failure.*out of memory", "OutOfMemory|out of memory|OUT_OF_MEMORY",
         "6027, 1087, 5372 (under load), 23769, 5285 (graphs), 445 (weights)",
         tried_gib=rf"[Tt]ried to allocate {_SIZE_N}", total_gib=rf"total capacity of {_SIZE_N}",
         free_gib=rf"of which {_SIZE_N} is free", process_gib=rf"this process has {_SIZE_N}"),
    _row("unbalanced", r"memory capacity is unbalanced", "is unbalanced",
         "distributed/bootstrap.py: somebody holds memory of some GPUs", phases=_STARTING),
    _row("xid", r"\bNVRM: Xid|\bXid \(|uncorrectable (?:ECC|NVLink) error|fallen off the bus",
         "Xid|uncorrectable|fallen off", "18421: the hardware or its driver"),
    _row("illegal_access", r"illegal memory access|device-side assert|unspecified launch failure"
         r"|AcceleratorError(?!.*(?:kernel image|out of memory|driver version))",
         "illegal memory|AcceleratorError|device-side|launch failure", "18785 (HiCache), 13308, 13234, 8336"),
    _row("shm", r"Error while creating shared memory segment|/dev/shm.*No space|No space.*/dev/shm|Bus error"
         r"|\bSIGBUS|exit code:? -7\b", "shared memory segment|/dev/shm|Bus error|SIGBUS|exit code",
         "PR 1986: /dev/shm is too small or full"),
    _row("kv_slots", r"(?:Prefill|Decode) out of memory\. Try to lower your batch size", "out of memory. Try",
         "393: slots of the KV pool, not CUDA memory"),
    _row("host_memory", r"Not enough host memory available|\[Errno 12\]|Cannot allocate memory|^MemoryError"
         r"|DefaultCPUAllocator: (?:can't|not enough)",
         "host memory av|Errno 12|Cannot allocate|DefaultCPUAllocator|MemoryError",
         "5372, PR 20287: --hicache-size is per rank", requested_gib=rf"Requesting {_N}"),
    _row("disk_full", r"No space left on device|\[Errno 28\]|Disk quota exceeded",
         "No space left|Errno 28|quota exceeded", "28653: also an ext4 directory's index, with TBs free"),
    _row("memory_leak", r"memory leak detected", "memory leak", "20010, 11970, 6888, 36081: an idle check"),
    _row("address_in_use", r"error while attempting to bind on address", "attempting to bind",
         "uvicorn binds after the whole load and exits 3"),
    _row("port_wait", r"is not available in \d+ seconds|[Pp]ort (?:\d+ )?is already in use"
         r"|[Aa]ddress already in use|engine_info_bootstrap_port.*(?:in use|not available)",
         "not available in|already in use|bootstrap_port",
         "utils/network.py: ports of DP attention and torch.distributed; a teardown can take > 30 s"),
    _row("kv_dtype", r"only supports kv[-_]cache[-_]dtype|fp8e4nv not supported"
         r"|kv[-_ ]cache[-_ ]dtype.*(?:not supported|unsupported)", "dtype|fp8e4nv", "ktransformers 1978"),
    _row("config", r"error: (?:unrecognized arguments|ambiguous option|argument |the following arguments)"
         r"|invalid choice:", "error: |invalid choice", "argparse, exit 2", phases=("arguments",)),
    _row("bad_model", r"is not a local folder and is not a valid model|HFValidationError|Repo id must be"
         r"|[Rr]epository ?Not ?Found|\b401 Client Error|[Gg]ated ?[Rr]epo|SafetensorError"
         r"|(?:argument|option) .trust_remote_code=True|not appear to have a file|tectures .* not supported",
         "local folder|Repo|repo|401 Client|trust_remote|Safetensor|appear to have|architectures",
         "the model's name, access, files or code", FOLLOWS, _STARTING),
    _row("environment", r"^(?:[\w.]+\.)?(?:ImportError|ModuleNotFoundError): |assert_pkg_version"
         r"|no kernel image|CUDA driver version is insuff|undefined symbol|is not installed or its version",
         "ImportError|ModuleNotFound|assert_pkg|kernel image|driver version|undefined sym|not installed or",
         "packages, driver or card do not fit together", FOLLOWS, _STARTING),
    _row("killed_in_init", r"died during initialization \(exit code: -9\)", "during initialization",
         "PR 20287, 37931, 6914: mostly the host's memory", FOLLOWS, _STARTING),
    _row("nccl", r"Watchdog caught collective operation timeout|ProcessGroupNCCL.*(?:timeout|stuck)"
         r"|NCCL error", "collective operation|ProcessGroupNCCL|NCCL error",
         "3784, 3932, 1691, 18421; also after a rank died", FOLLOWS),
    _row("watchdog", r"atchdog timeout \(self\.watchdog_timeout=(?!.*soft=True)", "atchdog timeout",
         "3752, 3836, 9904, 17941, 33549; a soft one only tells", FOLLOWS, timeout_s=rf"dog_timeout={_N}"),
    _row("graph_capture", r"Capture .*graph failed", "graph failed", "4489: without the words out of memory",
         FOLLOWS, _STARTING),
    _row("bad_value", r"^(?:ValueError|AssertionError|TypeError)\b", "Error", "before the weights load",
         GENERIC, ("arguments",)),
    _row("exception", r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception)(?::|$)", "Error|Exception",
         "the last word of a traceback", GENERIC),
    _row("child_killed", r"crashed with exit code -9\b", "crashed with", "≥ 0.5.10: a scheduler got SIGKILL",
         GENERIC),
    _row("child_crashed", r"(?:crashed with|\() ?exit code:? -?(?!9\b)\d", "exit code", "≥ 0.5.10", GENERIC,
         exit_code=r"exit code:? (-?\d{1,5})"),
    _row("warmup", r"Initialization failed\. warmup error", "warmup error", "as what lies below", LAST_WORDS),
    _row("token_state", r"state was deleted in TokenizerManager", "state was deleted", "36333", LAST_WORDS),
    _row("sigterm", r"SIGTERM received", "SIGTERM", "drains, then exits 0", LAST_WORDS),
    _row("child_died", r"SIGQUIT received|[Rr]eceived sigquit|kill_process_tree called.*include_parent=True",
         "SIGQUIT|sigquit|kill_process_tree", "it ends itself by SIGKILL: -9 is no OOM killer", SUICIDE),
)  # fmt: skip

_BY_NAME = {signature.name: signature for signature in SIGNATURES}
_NEEDLES = [(needle, one) for one in SIGNATURES for needle in one.needles]
_PLACE = {name: i for i, name in enumerate(_BY_NAME)}


def signatures_in(message: str, log_phase: LogPhase) -> list[str]:
    """Names of the signatures that a line's message carries, the most telling first."""
    found = [one for needle, one in _NEEDLES if needle in message and log_phase in one.phases]
    return [one.name for one in dict.fromkeys(found) if one.pattern.search(message)]


def classify(log: LogLike, exit_status: int | None, phase: Literal["start", "serving"]) -> Evidence:
    """The root of a death, never its last symptom.

    `exit_status` as subprocess or a shell gives it, None for a process that has not ended. A server that says
    that it ends itself was not killed by anybody, whatever its status; only one killed without a word was.
    """
    status = 128 - exit_status if exit_status is not None and exit_status > 128 else exit_status
    current = {name: seen for name, match in log.matches.items() if (seen := _current(match, log.progress))}
    log_phase = log.phase
    if phase == "serving":  # of a log that shows no phases we know better
        log_phase = "serving"
        current = {name: seen for name, seen in current.items() if log_phase in _BY_NAME[name].phases}
        if log.phase == "arguments":
            current = {name: replace(seen, log_phase=log_phase) for name, seen in current.items()}
    if phase == "start" and status in (2, 3):  # argparse; uvicorn that could not bind
        name = "config" if status == 2 else "address_in_use"
        return _evidence(name, current.get(name), log_phase)
    name = min(current, key=lambda one: (_BY_NAME[one].rank, current[one].number, _PLACE[one]), default="")
    if name and _BY_NAME[name].rank < LAST_WORDS:
        return _evidence(name, current[name], log_phase)
    by_status = {-7: "shm", -15: "sigterm", -6: "crashed", -11: "crashed", -4: "crashed", -8: "crashed"}
    if status in by_status:
        return _evidence(by_status[status], current.get(by_status[status]), log_phase)
    name = name or ("killed" if status == -9 else "unknown")
    return _evidence(name, current.get(name), log_phase)


def _current(match: Match, progress: int) -> Seen | None:
    """The earliest known line of it that the server did not outlive."""
    return next((s for s in (match.first, match.last) if progress - s.progress <= _OUTLIVED_AFTER), None)


def _evidence(name: str, seen: Seen | None, log_phase: LogPhase) -> Evidence:
    if seen is None:
        return Evidence(name, log_phase=log_phase)
    numbers = {}
    for key, pattern in _BY_NAME[name].numbers.items():
        if found := pattern.search(seen.line):
            unit = found[2] if pattern.groups > 1 else ""
            numbers[key] = round(float(found[1]) * _SIZE.get(unit, 1), 6)
    return Evidence(name, seen.line[:_LINE_CHARS], numbers, seen.log_phase)


_WHILE: Mapping[str, str] = {
    "arguments": "at its start", "loading": "while it loaded its weights",
    "kv": "while it made its KV pool", "graphs": "while it captured CUDA graphs",
    "warmup": "while it warmed up", "serving": "under load",
}  # fmt: skip

_SENTENCES: Mapping[str, str] = {
    "kv_budget": "its weights left no room for the KV pool under mem-fraction-static",
    "gpu_oom": "CUDA out of memory {when}",
    "unbalanced": "some of its GPUs were in use by somebody else",
    "xid": "a GPU or its driver failed {when}",
    "environment": "its packages, driver and GPU do not fit together",
    "illegal_access": "a CUDA kernel failed {when}",
    "shm": "/dev/shm was full or too small {when}",
    "kv_slots": "it found no free KV slots for a batch",
    "host_memory": "the host's memory did not suffice {when}",
    "disk_full": "a disk was full {when}",
    "memory_leak": "its own check found a leak in the KV pool",
    "address_in_use": "its port was taken",
    "port_wait": "one of its inner ports was still taken",
    "kv_dtype": "this GPU or attention backend does not support the KV dtype",
    "bad_model": "the model could not be found, reached or read",
    "config": "its arguments were refused",
    "bad_value": "its arguments do not work together",
    "killed_in_init": "one of its processes was killed {when}, most likely for want of host memory",
    "nccl": "its GPUs lost touch with each other (NCCL) {when}",
    "watchdog": "its scheduler stood still until its own watchdog ended it",
    "graph_capture": "capturing CUDA graphs failed",
    "child_killed": "one of its processes was killed {when}, by somebody or for want of host memory",
    "child_crashed": "one of its processes crashed {when}",
    "exception": "it raised an exception {when}",
    "warmup": "its warm-up request failed",
    "token_state": "it lost track of its requests",
    "sigterm": "somebody else told it to end (SIGTERM)",
    "child_died": "one of its processes failed and it ended itself; its log does not say why",
    "crashed": "it crashed {when}",
    "killed": "it was killed {when} without a word in its log: by somebody, or for want of host memory",
    "unknown": "it ended {when}; its log does not say why",
}  # fmt: skip


def _shortened(line: str) -> str:
    """Without a logger's own stamp, and without the advice that SGLang and torch add: " If …"."""
    words = _STAMP.sub("", line).partition(". If ")[0].rstrip(".")
    return words if len(words) <= _SHOWN_CHARS else f"{words[:_SHOWN_CHARS].rpartition(' ')[0]} …"


def cause_of_death(evidence: Evidence, exit_status: int | None) -> str:
    """One sentence for a person at 3 a.m., without a full stop."""
    sentence = _SENTENCES.get(evidence.signature, evidence.signature.replace("_", " "))
    sentence = sentence.format(when=_WHILE.get(evidence.log_phase, "")).strip()
    numbers = evidence.numbers
    if "tried_gib" in numbers and "free_gib" in numbers:
        sentence += f" ({numbers['tried_gib']:.2f} GiB wanted, {numbers['free_gib']:.2f} GiB free)"
    elif evidence.line:
        sentence += f": {_shortened(evidence.line)}"
    return sentence if exit_status is None else f"{sentence} (exit status {exit_status})"
