"""The main process: start-up, the HTTP server, the watch over its children, the ways to end."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from promptmill.sim import acting, crashes, flags
from promptmill.sim.faults import BadFault, Fault, parse_faults
from promptmill.sim.link import Link
from promptmill.sim.logs import Log
from promptmill.sim.memory import memory_of
from promptmill.sim.processes import exit_code, fork, idle, kill_process_tree
from promptmill.sim.startup import Crash, load
from promptmill.sim.text import ModelFiles

_DEFAULT_FRACTION = 0.88


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until it is ended; returns its exit status, unless it kills itself (-9)."""
    started = time.monotonic()
    args, sim = flags.parse(list(sys.argv[1:] if argv is None else argv))
    memory = memory_of(sim, args["device"])
    log = Log(sim.sim_version, "", args["log_level"], memory.is_gpu)
    try:
        faults = _faults(sim)
    except (BadFault, OSError) as error:
        sys.stderr.write(f"launch_server.py: error: {error}\n")
        return 2
    files = ModelFiles(args["model_path"], args["tokenizer_path"], args["chat_template"])
    if (status := _refuse_arguments(args, log, faults)) is not None:
        return status
    _resolve(args, memory.is_gpu)
    shown = {key: value for key, value in args.items() if key != "launch_command"}
    log.info(f"server_args={shown}")
    signal.signal(signal.SIGQUIT, lambda *_: _child_failed_at_start(log))
    ours, theirs = socket.socketpair()

    def scheduler() -> int:
        ours.close()
        return _scheduler(theirs, args, sim, files, faults, memory)

    schedulers = [fork("sglang::scheduler_TP0", scheduler)]
    schedulers += [fork(f"sglang::scheduler_TP{rank}", idle) for rank in range(1, args["tp_size"])]
    children = {pid: f"scheduler_{rank}" for rank, pid in enumerate(schedulers)}
    children[fork("sglang::detokenizer", idle)] = "detokenizer_0"
    theirs.close()
    # The slow imports come while the scheduler loads.
    import asyncio

    from promptmill.sim.serve import Life, serve

    _ = files.tokenizer if files.has_tokenizer else None
    ready = _wait_until_loaded(Link(ours), schedulers[0], log)
    if ready is None:
        return 1
    life = Life(args, sim, ready, files, faults, log, children, time.monotonic() - started)
    return asyncio.run(serve(life, ours))


def _scheduler(
    sock: socket.socket, args: dict[str, Any], sim: Any, files: ModelFiles, faults: list[Fault], memory: Any
) -> int:
    """The body of the scheduler process."""
    from promptmill.sim.worker import Worker

    rank = " TP0" if args["tp_size"] > 1 else ""
    rank += " EP0" if args["ep_size"] > 1 else ""
    log = Log(sim.sim_version, rank, args["log_level"], memory.is_gpu)
    try:
        loaded = load(log, args, sim, memory, files, faults)
        Worker(Link(sock), args, sim, files, loaded, faults, log).run()
    except Crash as crash:
        acting.crash(log, crash.name, True, crash.facts)


def _faults(sim: Any) -> list[Fault]:
    """Raises BadFault. Counts this launch where there is a --sim-state-dir."""
    lines = list(sim.sim_fault)
    if sim.sim_fault_file:
        lines += Path(sim.sim_fault_file).read_text(encoding="utf-8").splitlines()
    if not sim.sim_state_dir and any(",lives=" in line for line in lines):
        raise BadFault("lives=K counts launches in a folder: name one as --sim-state-dir")
    life = 1
    if sim.sim_state_dir:
        counter = Path(sim.sim_state_dir) / "launches"
        counter.parent.mkdir(parents=True, exist_ok=True)
        with counter.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        life = len(counter.read_text(encoding="utf-8").splitlines())
    return parse_faults(lines, life)


def _refuse_arguments(args: dict[str, Any], log: Log, faults: list[Fault]) -> int | None:
    """Status 1 and a traceback for what the real main process refuses before it starts anything."""
    names = {fault.name for fault in faults if fault.at_start}
    path = args["model_path"]
    text = None
    if "bad-model" in names or (Path(path).is_absolute() and not Path(path).exists()):
        text = crashes.bad_model(path)
    elif "kv-dtype" in names:
        text = crashes.bad_kv_dtype(args["kv_cache_dtype"])
    if text is None:
        return None
    kill_process_tree(log, include_parent=False)
    log.raw(text.rstrip())
    return 1


def _resolve(args: dict[str, Any], gpu: bool) -> None:
    """What the real one fills in."""
    defaults = {
        "tokenizer_path": args["model_path"],
        "served_model_name": args["model_path"],
        "device": "cuda" if gpu else "cpu",
        "mem_fraction_static": _DEFAULT_FRACTION,
        "chunked_prefill_size": 8192 if gpu else 4096,
        "attention_backend": "fa3" if gpu else "torch_native",
        "random_seed": random.randrange(1 << 30),
        "hicache_ratio": 2.0,
    }
    for key, value in defaults.items():
        if args[key] is None:
            args[key] = value


def _wait_until_loaded(link: Link, scheduler: int, log: Log) -> dict[str, Any] | None:
    """The scheduler's report; None if it died without a word, which is logged."""
    while True:
        try:
            for message in link.receive(0.2):
                return message
        except BrokenPipeError:
            pass
        if (code := exit_code(scheduler)) is not None:
            kill_process_tree(log, include_parent=False)
            log.raw(crashes.died_during_init(code).rstrip())
            return None


def _child_failed_at_start(log: Log) -> None:
    log.error("Received sigquit from a child process. It usually means the child failed.")
    kill_process_tree(log, include_parent=True)
