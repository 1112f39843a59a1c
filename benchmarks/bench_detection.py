"""How soon the end of a server is seen, and how soon the next one is launched. On the simulator, real time.

    .venv/bin/python benchmarks/bench_detection.py

Prints one JSON object. Seconds are from the fault to the mill's `Lost`; "to the next launch" is from there to
the moment that the next command has been started, diagnosis and the ending of the old life included.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from promptmill.errors import PromptmillError
from promptmill.generation.mill import Mill
from promptmill.prompts.manifest import prepare
from promptmill.run import Run, RunRequest
from promptmill.serving.server import Lost

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contextlib

from tests.contract.sglang_place import Engine, sim_model

INACTIVITY_S = 10.0
TIMES = 3


def main() -> None:
    faults = {
        "process killed": (["--sim-speed", "20"], "main"),
        "scheduler killed": (["--sim-speed", "20"], "scheduler"),
        "scheduler killed, no watchdog (0.5.9)": (["--sim-speed", "20", "--sim-no-watchdog"], "scheduler"),
        f"hang (inactivity {INACTIVITY_S:g} s)": (["--sim-speed", "20", "--sim-fault", "freeze@t=60"], ""),
        f"requests lost (inactivity {INACTIVITY_S:g} s)": (
            ["--sim-speed", "20", "--sim-fault", "lost@t=60"],
            "",
        ),
    }
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = sim_model(Path(folder))
        for name, (flags, victim) in faults.items():
            rounds = [
                one_round(Path(folder) / f"{abs(hash(name))}-{n}", model, flags, victim) for n in range(TIMES)
            ]
            results[name] = {
                "detected_s": [round(detected, 2) for detected, _ in rounds],
                "to_next_launch_s": [round(relaunched, 2) for _, relaunched in rounds],
                "median_detected_s": round(statistics.median(d for d, _ in rounds), 2),
            }
    print(json.dumps({"benchmark": "detection", "load": os.getloadavg(), "results": results}, indent=1))


def one_round(folder: Path, model: Path, flags: list[str], victim: str) -> tuple[float, float]:
    """Seconds from fault to detection, and from there to the next launch."""
    folder.mkdir()
    rows = [{"prompt": f"Tell me about the number {n}."} for n in range(400)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command = [sys.executable, "-m", "promptmill.sim", *flags, "--sim-mean-output", "4000"]
    engine = Engine(command, model, flags={"device": "cpu", "max-total-tokens": 8192})
    from promptmill.profile import load_profile

    path = engine.write_profile(folder)
    profile = load_profile(
        str(path),
        [
            f"server.inactivity_timeout_s={INACTIVITY_S}",
            "classes.short.max_new_tokens=1000",
            "server.max_in_flight=16",
        ],
    )
    with Run.open(profile, RunRequest(), "benchmark") as run:
        manifest = prepare(run.preparation("A_text"))
        run.accept([manifest])
        with run.mill([manifest]) as mill:
            waiter = threading.Thread(target=wait, args=(mill, manifest.partition))
            waiter.start()
            (server,) = run.servers.launch()
            mill.attach(server, run.servers.pass_gate(server, 128))
            ready = time.monotonic()
            while mill.figures().tokens_per_s == 0:
                time.sleep(0.05)
            fault_at = time.monotonic()
            if victim:
                assert server.process is not None
                pid = server.process.pid if victim == "main" else server._schedulers[0].pid
                os.kill(pid, signal.SIGKILL)
            else:
                fault_at = ready + 60 / 20  # the fault's own time, as the simulator counts it
            while (lost := mill.wait(0.5)) is None:
                pass
            detected = time.monotonic()
            assert isinstance(lost, Lost), lost
            run.servers.diagnose(lost)
            run.servers.launch()
            relaunched = time.monotonic()
        waiter.join()
    return detected - fault_at, relaunched - detected


def wait(mill: Mill, partition: str) -> None:
    with contextlib.suppress(PromptmillError):
        mill.generate(partition)


if __name__ == "__main__":
    main()
