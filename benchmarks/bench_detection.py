"""How soon the end of a server is seen and the next one launched, and what is no end. On the simulator.

    .venv/bin/python benchmarks/bench_detection.py [--quick]

Prints one JSON object. `detected_s` is from the fault to the mill's `Lost`, in real seconds;
`to_next_launch_s` from there until the next command has been started, diagnosis and the ending of the old
life included. `flow` is the same through `promptmill run`, Prefect included, by the lines that it prints.
`survived` are faults that end nothing; there the simulator's clock is fast, and the inactivity time 100 s
by it. --quick: the first deaths once, with half the inactivity time, and without the flow.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from promptmill.errors import PromptmillError
from promptmill.generation.mill import Finished, Mill
from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest
from promptmill.serving.server import Lost, Server
from tests.contract.sglang_place import Engine, sim_model

QUICK = "--quick" in sys.argv
INACTIVITY_S = 5.0 if QUICK else 10.0
TIMES = 1 if QUICK else 3
SPEED = 20
SURVIVING_SPEED = 100 / INACTIVITY_S


@dataclass(frozen=True)
class Death:
    name: str
    victim: str = ""
    """`main` or `scheduler`: killed by us. Empty: a fault of the simulator, counted from the last token."""
    flags: tuple[str, ...] = ()


DEATHS = [
    Death("process killed", "main"),
    Death("scheduler killed", "scheduler"),
    Death(f"requests lost, inactivity time {INACTIVITY_S:g} s", "", ("--sim-fault", "lost@t=100")),
    Death(f"hang, inactivity time {INACTIVITY_S:g} s", "", ("--sim-fault", "freeze@running=16")),
    Death("scheduler killed, nobody there notices (0.5.9)", "scheduler", ("--sim-no-watchdog",)),
]
SURVIVED = {
    "70 s without a token (a compile)": "freeze:70@t=30",
    "300 s of /health 503 under long prefills": "busy:300@t=10",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = sim_model(folder)
        result = {
            "benchmark": "detection",
            "load": os.getloadavg(),
            "deaths": {death.name: rounds(folder, model, death) for death in DEATHS[: 3 if QUICK else None]},
            **({} if QUICK else {"flow": through_the_flow(folder / "flow", model)}),
            "survived": {what: survives(folder, model, fault) for what, fault in SURVIVED.items()},
        }
    print(json.dumps(result, indent=1))


def rounds(folder: Path, model: Path, death: Death) -> dict[str, Any]:
    measured = [one_death(folder / f"{abs(hash(death))}-{n}", model, death) for n in range(TIMES)]
    return {
        "detected_s": [round(detected, 2) for detected, _ in measured],
        "to_next_launch_s": [round(launched, 2) for _, launched in measured],
    }


def one_death(folder: Path, model: Path, death: Death) -> tuple[float, float]:
    """Seconds from fault to detection, and from there to the next launch."""
    flags = ("--sim-speed", str(SPEED), "--sim-mean-output", "4000", *death.flags)
    with serving(folder, model, flags, INACTIVITY_S) as (run, mill, server, _):
        wait_for_tokens(mill)
        fault_at = time.monotonic()
        if death.victim:
            assert server.process is not None
            pid = server.process.pid if death.victim == "main" else server._schedulers[0].pid
            os.kill(pid, signal.SIGKILL)
            lost: Lost | Finished | None = outcome(mill, 120)
        else:
            tokens = 0
            while (lost := mill.wait(0.02)) is None:
                if (now := sum(part.tokens for part in mill.figures().partitions)) != tokens:
                    tokens, fault_at = now, time.monotonic()
        detected_at = time.monotonic()
        assert isinstance(lost, Lost), lost
        run.servers.diagnose(lost)
        run.servers.launch()
        return detected_at - fault_at, time.monotonic() - detected_at


def survives(folder: Path, model: Path, fault: str) -> dict[str, Any]:
    """Whether a run with such a fault ends in one life, in simulated seconds."""
    flags = ("--sim-speed", str(SURVIVING_SPEED), "--sim-mean-output", "2500", "--sim-fault", fault)
    with serving(folder / fault.partition(":")[0], model, flags, INACTIVITY_S) as (run, mill, _, ready_at):
        end = outcome(mill, 240)
        return {
            "false_deaths": len(run.servers.lives) - 1 + isinstance(end, Lost),
            "answered_all": isinstance(end, Finished) and mill.pending() == 0,
            "simulated_s": round(SURVIVING_SPEED * (time.monotonic() - ready_at)),
            "inactivity_simulated_s": SURVIVING_SPEED * INACTIVITY_S,
        }


def through_the_flow(folder: Path, model: Path) -> dict[str, float]:
    """From the line of the death to that of the next launch, Prefect's tasks between them included."""
    path = write(folder, model, ("--sim-speed", "5", "--sim-mean-output", "100"))
    command = [str(Path(sys.executable).with_name("promptmill")), "run", str(path)]
    command += ["--set", "chaos.kill_server_after_answers=20", "--set", "server.max_in_flight=16"]
    env = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    at: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env, cwd=folder) as run:
        assert run.stdout is not None
        for line in run.stdout:
            for word in ("[chaos]", "SERVER DIED", "launching server", "is ready after"):
                if word in line and (word != "launching server" or "SERVER DIED" in at):
                    at.setdefault(word, time.monotonic())
                    if word == "is ready after" and "SERVER DIED" in at:
                        at["ready again"] = time.monotonic()
    return {
        "killed_to_detected_s": round(at["SERVER DIED"] - at["[chaos]"], 2),
        "detected_to_launched_s": round(at["launching server"] - at["SERVER DIED"], 2),
        "launched_to_ready_s": round(at["ready again"] - at["launching server"], 2),
        "exit_status": run.returncode,
    }


def write(folder: Path, model: Path, flags: tuple[str, ...]) -> Path:
    folder.mkdir()
    rows = [{"prompt": f"Tell me about the number {n}."} for n in range(200)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "promptmill.sim", *flags]
    return Engine(command, model, flags={"device": "cpu", "max-total-tokens": 30_000}).write_profile(folder)


@contextlib.contextmanager
def serving(
    folder: Path, model: Path, flags: tuple[str, ...], inactivity_s: float
) -> Iterator[tuple[Run, Mill, Server, float]]:
    """A run without Prefect, its first server attached."""
    overrides = [f"server.inactivity_timeout_s={inactivity_s}", "classes.short.max_new_tokens=1000"]
    profile = load_profile(str(write(folder, model, flags)), [*overrides, "server.max_in_flight=16"])
    with Run.open(profile, RunRequest(), "benchmark") as run:
        manifest = prepare(run.preparation("A_text"))
        run.accept([manifest])
        with run.mill([manifest]) as mill:
            waiter = threading.Thread(target=generate, args=(mill, manifest.partition))
            waiter.start()
            (server,) = run.servers.launch()
            mill.attach(server, run.servers.pass_gate(server, 128))
            yield run, mill, server, time.monotonic()
        waiter.join()


def generate(mill: Mill, partition: str) -> None:
    with contextlib.suppress(PromptmillError):
        mill.generate(partition)


def wait_for_tokens(mill: Mill) -> None:
    while mill.figures().tokens_per_s == 0:
        time.sleep(0.05)


def outcome(mill: Mill, timeout_s: float) -> Lost | Finished:
    end = mill.wait(timeout_s)
    assert end is not None, "neither the end nor a death"
    return end


if __name__ == "__main__":
    main()
