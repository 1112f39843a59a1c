"""The window against fixed numbers of requests in flight, on the simulator over HTTP, in scaled time.

    .venv/bin/python benchmarks/bench_window.py

Prints one JSON object. Short and long answers, 376K KV tokens, the same server flags for all. `ratio` is a
policy's time over that of the window; `right` says that every answer is what the model gives to its prompt
alone, whatever else was in flight.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from promptmill.generation import replica, window
from promptmill.generation.mill import Finished
from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare, read_keys
from promptmill.run import Run, RunRequest
from tests.contract.sglang_place import sim_model

SPEED = 10
KV_TOKENS = 376_000
SHORT, LONG = 400, 200
PROFILE = """
model = "SmolLM2"
model_path = "{model}"
[server]
engine = "sglang"
version = "0.5.23"
command = {command}
gpu_wait_s = 0
poll_interval_s = 0.2
min_headroom_gib = 0
[server.flags]
device = "cpu"
max-total-tokens = {kv_tokens}
context-length = 32768
schedule-conservativeness = 0.3
[chat]
reasoning_open = ""
reasoning_close = ""
[sampling]
temperature = 0.0
[classes.short]
max_new_tokens = 1000
[classes.long]
max_new_tokens = 8000
[store]
url = "{folder}/store"
[release]
url = "{folder}/release"
[[partitions]]
name = "short"
source = "{folder}/short.jsonl"
[[partitions]]
name = "long"
source = "{folder}/long.jsonl"
class = "long"
"""


@dataclass(frozen=True)
class Policy:
    name: str
    fixed: int = 0
    """Requests in flight; 0: the window."""
    settings: tuple[str, ...] = ()


POLICIES = [
    Policy("window"),
    Policy("pools of 150 and 32", 182, ("classes.short.max_in_flight=150", "classes.long.max_in_flight=32")),
    Policy("500", 500),
]


@contextmanager
def in_force(policy: Policy) -> Iterator[None]:
    if not policy.fixed:
        with patch.object(replica, "_SAMPLE_S", replica._SAMPLE_S / SPEED):  # seconds of the simulated clock
            yield
        return
    with patch.object(window, "START", policy.fixed), patch.object(window.Window, "sample", lambda *_: None):
        yield


def write(folder: Path, model: Path) -> Path:
    rng = random.Random(1)
    words = ["river", "stone", "lamp", "seven", "green", "over", "under", "nine", "cloud", "paper"]
    for name, rows, length in (("short", SHORT, 600), ("long", LONG, 1500)):
        texts = (" ".join([str(n), *rng.choices(words, k=length)]) for n in range(rows))
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "promptmill.sim", "--sim-speed", str(SPEED), "--sim-mean-output", "2500"]
    path = folder / "profile.toml"
    path.write_text(
        PROFILE.format(model=model, command=json.dumps(command), kv_tokens=KV_TOKENS, folder=folder),
        encoding="utf-8",
    )
    return path


def measure(folder: Path, model: Path, policy: Policy) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Its figures, and output ids by prompt hash."""
    folder.mkdir()
    profile = load_profile(str(write(folder, model)), policy.settings)
    with in_force(policy), Run.open(profile, RunRequest(), "benchmark") as run:
        manifests = [prepare(run.preparation(name)) for name in run.partitions]
        run.accept(manifests)
        with run.mill(manifests) as mill:
            (server,) = run.servers.launch()
            mill.attach(server, run.servers.pass_gate(server, run.longest_request_tokens(manifests)))
            began, cpu = time.monotonic(), time.process_time()
            waiters = [threading.Thread(target=mill.generate, args=(m.partition,)) for m in manifests]
            each(waiters, threading.Thread.start)
            widest = 0
            while not isinstance(mill.wait(0.5), Finished):
                widest = max(widest, mill.figures().in_flight)
            seconds = time.monotonic() - began
            each(waiters, threading.Thread.join)
            figures = mill.figures()
        hashes = [h for m in manifests for samples in read_keys(m) for chain in samples for h in chain]
        answers = run.store.lookup(hashes)
    tokens = sum(answer.completion_tokens for answer in answers.values())
    result = {
        "simulated_s": round(seconds * SPEED),
        "tokens_per_simulated_s": round(tokens / seconds / SPEED),
        "most_in_flight": widest,
        "retractions": figures.retractions,
        "driver_cpu_s": round(time.process_time() - cpu, 1),
    }
    return result, {prompt_hash: answer.output_ids for prompt_hash, answer in answers.items()}


def each(threads: list[threading.Thread], action: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        action(thread)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        model = sim_model(Path(name))
        results, outputs = {}, []
        for n, policy in enumerate(POLICIES):
            results[policy.name], ids = measure(Path(name) / str(n), model, policy)
            outputs.append(ids)
        ours = results["window"]["simulated_s"]
        for result in results.values():
            result["ratio"] = round(result["simulated_s"] / ours, 3)
        right = len(outputs[0]) == SHORT + LONG and all(ids == outputs[0] for ids in outputs)
    load = [round(n, 2) for n in os.getloadavg()]
    print(json.dumps({"benchmark": "window", "policies": results, "right": right, "load": load}, indent=1))


if __name__ == "__main__":
    main()
