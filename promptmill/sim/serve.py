"""The serving half of the main process: bind, warm up, watch, drain."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from promptmill.sim.app import make_app
from promptmill.sim.faults import Fault
from promptmill.sim.generate import make_state, submit
from promptmill.sim.hub import Hub
from promptmill.sim.logs import Log
from promptmill.sim.processes import exit_code, kill_process_tree
from promptmill.sim.sampling import resolve
from promptmill.sim.text import ModelFiles

_KEEP_ALIVE_S = 5.0
_BIND_FAILED = 3


@dataclass(slots=True)
class Life:
    """Everything that serving starts from."""

    args: dict[str, Any]
    sim: Any
    ready: dict[str, Any]
    files: ModelFiles
    faults: list[Fault]
    log: Log
    children: dict[int, str]
    startup_s: float


async def serve(life: Life, sock: socket.socket) -> int:
    """Serve until SIGTERM or a failure; returns the exit status."""
    log, args = life.log, life.args
    hub = Hub(args, life.sim, life.ready, life.files, life.faults, log)
    _greet(life)
    runner = web.AppRunner(
        make_app(hub, life.startup_s),
        handler_cancellation=True,
        keepalive_timeout=_KEEP_ALIVE_S,
        access_log=None,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    site = web.TCPSite(runner, args["host"], args["port"], backlog=2048)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        return _cannot_bind(life, error)
    log.info(f"INFO:     Uvicorn running on http://{args['host']}:{args['port']} (Press CTRL+C to quit)")
    tasks = await hub.connect(sock)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGQUIT, _child_failed, life)
    loop.add_signal_handler(signal.SIGTERM, _terminate, hub)
    loop.add_signal_handler(signal.SIGINT, stop.set)
    if not (life.sim.sim_no_watchdog or log.old or any(f.name == "zombie" for f in life.faults)):
        tasks.append(asyncio.create_task(_watch(life)))
    tasks.append(asyncio.create_task(_warm_up(life, hub)))
    await _until_drained(life, hub, stop)
    for task in tasks:
        task.cancel()
    log.info("INFO:     Shutting down")
    log.info("INFO:     Waiting for application shutdown.")
    await runner.cleanup()
    log.info("INFO:     Application shutdown complete.")
    log.info(f"INFO:     Finished server process [{os.getpid()}]")
    kill_process_tree(log, include_parent=False)
    return 0


def _greet(life: Life) -> None:
    if not life.log.old:
        life.log.info(
            f"Engine startup timings (s): load_weight={life.startup_s * 0.5:.2f}, "
            f"kv_cache_allocation={life.startup_s * 0.1:.2f}, scheduler_e2e={life.startup_s:.2f}, "
            "cuda_graph={prefill=0.00, decode=0.00, target_verify=0.00, draft_prefill=0.00, "
            f"draft_decode=0.00, draft_extend=0.00}}, tokenizer_e2e={life.startup_s:.2f}"
        )
    life.log.info(f"INFO:     Started server process [{os.getpid()}]")
    life.log.info("INFO:     Waiting for application startup.")
    life.log.info("INFO:     Application startup complete.")


def _cannot_bind(life: Life, error: OSError) -> int:
    """After the whole load; the warm-up has meanwhile greeted whoever holds the port."""
    log, address = life.log, (life.args["host"], life.args["port"])
    reason = os.strerror(error.errno or errno.EADDRINUSE).lower()
    log.error(
        f"ERROR:    [Errno {error.errno}] error while attempting to bind on address {address}: {reason}"
    )
    log.info("INFO:     Waiting for application shutdown.")
    log.info("The server is fired up and ready to roll!")
    log.info("INFO:     Application shutdown complete.")
    kill_process_tree(log, include_parent=False)
    return _BIND_FAILED


async def _warm_up(life: Life, hub: Hub) -> None:
    """The real one asks itself over HTTP; here only its log lines and its request are alike."""
    log = life.log
    if any(fault.at_start and fault.name == "warmup" for fault in life.faults):
        log.error("Initialization failed. warmup error: Traceback (most recent call last):")
        log.raw("AssertionError: res=<Response [500]>, res.text='Internal Server Error'")
        kill_process_tree(log, include_parent=True)
    if not life.args["skip_server_warmup"]:
        log.access("127.0.0.1:33568", "GET", "/model_info", 200, "OK")
        sampling = resolve({"max_new_tokens": 8, "temperature": 0, "ignore_eos": True})
        ids = [7, 11, 13, 17, 19, 23]
        state = make_state(hub, ids, sampling, False, "WARM_UP", {})
        submit(hub, state)
        await hub.finished(state)
        log.access("127.0.0.1:33584", "POST", "/generate", 200, "OK")
        log.access("127.0.0.1:33614", "POST", "/freeze_gc", 200, "OK")
    hub.status = "Up"
    log.info("The server is fired up and ready to roll!")


async def _watch(life: Life) -> None:
    """SGLang's SubprocessWatchdog: it looks once a second, and a status of 0 is none of its business."""
    while True:
        await asyncio.sleep(1 / life.sim.sim_speed)
        for pid, name in list(life.children.items()):
            if (code := exit_code(pid)) is None:
                continue
            del life.children[pid]
            if code:
                life.log.error(
                    f"Subprocess {name} (pid={pid}) crashed with exit code {code}. "
                    "Triggering SIGQUIT for cleanup..."
                )
                os.kill(os.getpid(), signal.SIGQUIT)


def _child_failed(life: Life) -> None:
    """SIGQUIT: blocks the loop, as the real handler does, and ends in SIGKILL."""
    log = life.log
    log.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
    if not log.old:
        log.info("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        time.sleep(5 / life.sim.sim_speed)
        if not any(Path(f"/proc/{pid}").exists() for pid, name in life.children.items() if "sched" in name):
            log.info("No live scheduler processes found; skipping py-spy and CUDA coredump.")
    kill_process_tree(log, include_parent=True)


def _terminate(hub: Hub) -> None:
    if not hub.exiting:
        hub.exiting = True
        hub.log.info("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")


async def _until_drained(life: Life, hub: Hub, stop: asyncio.Event) -> None:
    """Until SIGTERM and then until the last request is over; looks every five seconds, as the real one."""
    while not stop.is_set():
        if hub.exiting:
            rids = list(hub.states)
            life.log.info(
                f"Gracefully exiting... Remaining number of requests {len(rids)}. "
                f"Remaining requests remaining_rids={rids}."
            )
            if not rids or hub.status == "UnHealthy":
                return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 5 / life.sim.sim_speed)
