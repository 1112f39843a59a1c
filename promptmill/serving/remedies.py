"""What to do after a server failed to start or died. Pure: history in, one verdict out.

    verdict = decide(deaths, max_relaunches=8, version=(0, 5, 23))

One change at a time, and none that changes the answers. A log's signatures are in signatures.py; those that
the gate and the watch give are `low_headroom`, `kv_too_small`, `hang`, `zombie`, `collapse`, `lost_requests`,
`no_start_progress`, `refused`, `unreachable`, `restart_failed`, `ids_differ` and `wrong_server`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from promptmill.serving.deaths import Death, History, Phase, Step, Verdict, number, step, wait
from promptmill.serving.memory_remedies import (
    fewer_requests,
    gpu_oom,
    graph_capture,
    kv_budget,
    kv_too_small,
    low_headroom,
)
from promptmill.settings import FlagValue

__all__ = ["Death", "Phase", "Step", "Verdict", "decide"]

_SAME_DEATHS = 3
_USUAL_WATCHDOG_S, _LONGEST_WATCHDOG_S = 300, 1800
_HICACHE = ("enable-hierarchical-cache", "enable-hicache")
_LEAST_HICACHE_GB = 16
_LEAK_CHECK = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"
_SHM = (
    "Raise it (docker: --shm-size or --ipc=host), or remove what dead servers left there "
    "(sgl_shm_*, sglang_loads_*, nccl-*)."
)

_LOOK = "What each life died of stands in the table of lives, the whole logs in servers/ beside the journal."
_AWAY = "Whoever runs it has to start it; or name a command that does as server.restart_command."

_STOPS = {
    "config": ("the server refuses its arguments", "Correct server.flags; this version's --help lists them."),
    "bad_value": ("the server's arguments do not work", "Correct server.flags; the log names the one."),
    "bad_model": ("the model cannot be used", "Check model, model_path, trust_remote_code and your access."),
    "environment": ("the server's environment is broken", "Its packages, the driver and the GPU must fit."),
    "xid": ("a GPU or its driver failed", "Look into dmesg for Xid; reset the GPU or use another host."),
    "kv_dtype": ("the KV dtype is not supported here", "Choose another kv-cache-dtype; it changes the "
                 "answers, so promptmill never does."),
    "shm": ("/dev/shm is full or too small", _SHM),
    "disk_full": ("a disk is full", "Free some space; with hicache-storage-backend look at its folder too."),
    "ids_differ": ("the server does not render prompts as we do", "Its model, revision or chat template is "
                   "another one than ours, or it has none: see above."),
    "wrong_server": ("another server answers here", "End it, or set server.port = 0 (any free one)."),
}  # fmt: skip


def decide(deaths: Sequence[Death], max_relaunches: int, version: tuple[int, ...] | None = None) -> Verdict:
    """The verdict after the last of `deaths` (all of this run, oldest first; at least one).

    `version` is SGLang's; a flag whose name depends on it is left alone where it is None.
    """
    history = History(deaths, version)
    last = history.last
    if last.signature in _STOPS:
        why, advice = _STOPS[last.signature]
        return Verdict("stop", why, advice=advice)
    verdict = _RULES.get(last.signature, _as_it_was)(history)
    if last.permanent:
        return verdict if verdict.action == "stop" else Verdict("stop", "a relaunch cannot mend this")
    if last.quarantined:
        verdict = Verdict("quarantine", f"prompt {last.quarantined[0][:16]} was alone at two deaths")
    elif verdict.action == "stop":
        return verdict
    elif _identical(deaths[-_SAME_DEATHS:]):
        why = f"{_SAME_DEATHS} lives in a row ended the same way without one answer"
        return Verdict("stop", why, advice=_LOOK)
    if len(deaths) > max_relaunches:
        return Verdict("stop", f"server.max_relaunches = {max_relaunches} is used up")
    return verdict


def _identical(recent: Sequence[Death]) -> bool:
    return (
        len(recent) == _SAME_DEATHS
        and len({death.kind for death in recent}) == 1
        and not any(death.answers or death.quarantined for death in recent)
    )


def _as_it_was(_: History) -> Verdict:
    return Verdict("relaunch", "as it was")


def _waits(why: str, advice: str) -> Callable[[History], Verdict]:
    return lambda history: wait(history, why, advice)


def _kv_slots(h: History) -> Verdict:
    flag, why = "schedule-conservativeness", "the KV pool ran out of slots"
    now = number(h.last.flags.get(flag))
    if (now or 1.0) < 1.3:
        return step(why, Step(flag, now, round((now or 1.0) + 0.3, 2)))
    return fewer_requests(h, why) or _as_it_was(h)


def _illegal_access(h: History) -> Verdict:
    why, flags = "a CUDA kernel failed again", h.last.flags
    if h.count == 1:
        return _as_it_was(h)
    if off := _without_hicache(flags):
        return step(why, *off)
    drafting = [Step(name, value, None) for name, value in flags.items() if name.startswith("speculative-")]
    if drafting:
        return step(why, *drafting)
    if not flags.get("disable-overlap-schedule"):
        return step(why, Step("disable-overlap-schedule", None, True))
    return _as_it_was(h)


def _without_hicache(flags: Mapping[str, FlagValue]) -> list[Step]:
    """Nothing where it is off."""
    if not any(flags.get(name) for name in _HICACHE):
        return []
    return [
        Step(name, value, None) for name, value in flags.items() if name in _HICACHE or "hicache-" in name
    ]


def _smaller_hicache(h: History, why: str) -> Verdict | None:
    flags = h.last.flags
    off = _without_hicache(flags)
    size, ratio = number(flags.get("hicache-size")), number(flags.get("hicache-ratio"))
    if not off:
        return None
    if size and size >= 2 * _LEAST_HICACHE_GB:
        return step(f"{why}, and hicache-size is per rank", Step("hicache-size", int(size), int(size) // 2))
    if not size and (ratio or 2.0) > 1.5:
        return step(why, Step("hicache-ratio", ratio, 1.5))
    return step(why, *off)


def _host_memory(h: History) -> Verdict:
    why = "the host's memory does not suffice"
    advice = "See free and dmesg; hicache-size is per rank. Load with fewer threads, or take a larger host."
    return _smaller_hicache(h, why) or wait(h, why, advice, times=2)


def _killed_in_init(h: History) -> Verdict:
    """SIGKILL without a word: mostly the kernel, for want of memory, sometimes a person."""
    why = "one of its processes was killed while it started"
    if smaller := _smaller_hicache(h, why):
        return smaller
    if h.streak == 1:
        return _as_it_was(h)
    advice = "Most likely the host's memory is too small: see dmesg for oom-kill; load with fewer threads."
    return Verdict("stop", f"{why}, {h.streak} times in a row", advice=advice)


def _killed(h: History) -> Verdict:
    if h.last.phase == "start" and h.last.signature == "child_killed":
        return _killed_in_init(h)
    return (_smaller_hicache(h, "it was killed again") if h.streak > 1 else None) or _as_it_was(h)


def _nccl(h: History) -> Verdict:
    if h.last.phase == "start" and "unhandled system error" in h.evidence.line:
        return Verdict("stop", "NCCL cannot start: mostly /dev/shm is too small", advice=_SHM)
    return _as_it_was(h)


def _watchdog(h: History) -> Verdict:
    flag, why = "watchdog-timeout", "its watchdog ended it again"
    now = number(h.last.flags.get(flag))
    seconds = int(now or h.evidence.numbers.get("timeout_s", _USUAL_WATCHDOG_S))
    if h.count == 1:
        return _as_it_was(h)
    if seconds < _LONGEST_WATCHDOG_S:
        return step(why, Step(flag, seconds, min(2 * seconds, _LONGEST_WATCHDOG_S)))
    return fewer_requests(h, why) or _as_it_was(h)


def _memory_leak(h: History) -> Verdict:
    now = h.last.env.get(_LEAK_CHECK)
    if now == "0":
        return _as_it_was(h)
    return step("its own leak check ended it while idle", Step(f"env:{_LEAK_CHECK}", now, "0"))


def _collapse(h: History) -> Verdict:
    why = "its throughput collapsed again"
    return (fewer_requests(h, why, only_running=True) if h.streak > 1 else None) or _as_it_was(h)


def _no_start_progress(h: History) -> Verdict:
    if h.streak == 1:
        return _as_it_was(h)
    advice = "Look at the end of its log; several servers that load from one disk should start one by one."
    return Verdict("stop", f"the start stood still, {h.streak} times in a row", advice=advice)


_RULES: Mapping[str, Callable[[History], Verdict]] = {
    "gpu_oom": gpu_oom,
    "graph_capture": graph_capture,
    "low_headroom": low_headroom,
    "kv_budget": kv_budget,
    "kv_too_small": kv_too_small,
    "kv_slots": _kv_slots,
    "host_memory": _host_memory,
    "killed_in_init": _killed_in_init,
    "child_killed": _killed,
    "killed": _killed,
    "illegal_access": _illegal_access,
    "nccl": _nccl,
    "watchdog": _watchdog,
    "memory_leak": _memory_leak,
    "collapse": _collapse,
    "no_start_progress": _no_start_progress,
    "unbalanced": _waits("somebody else holds memory of these GPUs", "nvidia-smi says who; end it."),
    "port_wait": _waits("one of its ports is not free yet", "ss -ltnp says who has it; end it."),
    "address_in_use": _waits("its port was taken", "Set server.port = 0; ss -ltnp says who has it."),
    "refused": _waits("it refuses connections", _AWAY),
    "unreachable": _waits("nothing usable answers at its address", _AWAY),
    "restart_failed": _waits("server.restart_command failed", "Run it by hand; its words are above."),
}
"""What is not here is relaunched as it was: hang, zombie, lost_requests, exception, crashed, sigterm …"""
