"""The window against fixed numbers of requests in flight, on the simulator over HTTP, in scaled time.

    .venv/bin/python benchmarks/bench_window.py [--quick]

Prints one JSON object. The first prompts of the workload in admission.py, each as long as it says and
answered with as many tokens as it says, on 376K KV tokens; the same server and the same flags for all.

By hand is a fixed number of requests, each partition in input order, all partitions side by side. promptmill
is the window, and the prompts in its own order. The fixed number in promptmill's order is there to tell the
two apart; --quick leaves it out, and takes fewer prompts at twice the speed.

`ratio` is a policy's time over that of promptmill by the server's own clock, which stands still where this
machine is short of CPU; on an idle one that of `wall_s` is the same. `in virtual time` is the same ratio out
of admission.py. `right` says that every answer has its length and is what the other policies got for that
prompt, whatever else was in flight.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.admission import read_workload
from benchmarks.fixed_lengths import busy_s, digest
from promptmill.generation import picker, prompts, replica, window
from promptmill.generation.mill import Finished
from promptmill.planning.simulation import FixedPools, Simulation, Work, fixed_number
from promptmill.profile import load_profile
from promptmill.prompts.manifest import prepare, read_prompts
from promptmill.run import Run, RunRequest
from promptmill.store import journal
from promptmill.types import Manifest
from tests.contract.sglang_place import sim_model

QUICK = "--quick" in sys.argv
PROMPTS, SPEED = (1300, 100) if QUICK else (1760, 50)
KV_TOKENS = 376_000
POLL_S = 5.0
STREAM_INTERVAL = 256
"""At the usual 32 two cores would be too slow for such a speed."""
OWN_TOKENS = 32
"""What the chat template and a prompt's number take, about."""
LONG = ("B3_agent", "B4_deepseek")
PROFILE = """
model = "SmolLM2"
model_path = "{model}"
[server]
engine = "sglang"
version = "0.5.23"
command = {command}
gpu_wait_s = 0
poll_interval_s = {poll_s}
stream_interval = {stream_interval}
min_headroom_gib = 0
accept_rendering_difference = true
[server.flags]
device = "cpu"
tokenizer-path = "/none"
sim-vocab = 49152
sim-eos-id = 2
max-total-tokens = {kv_tokens}
context-length = 65536
chunked-prefill-size = 8192
schedule-conservativeness = 0.3
[chat]
reasoning_open = ""
reasoning_close = ""
[sampling]
temperature = 0.0
[classes.short]
max_new_tokens = 10240
[classes.long]
max_new_tokens = 16384
[store]
url = "{folder}/store"
[release]
url = "{folder}/release"
"""
PARTITION = """
[[partitions]]
name = "{name}"
source = "{folder}/{name}.jsonl"
class = "{length_class}"
"""


@dataclass(frozen=True)
class Policy:
    name: str
    fixed: int = 0
    """Requests in flight; 0: the window."""
    by_hand: bool = True
    """In input order, and without a thought for how long a partition's answers are."""
    long: int = 0
    """How many of those may be of long partitions, and no more than the rest of short ones; 0: any."""

    def settings(self) -> list[str]:
        pools = {"short": self.fixed - self.long, "long": self.long} if self.long else {}
        return [f"classes.{name}.max_in_flight={size}" for name, size in pools.items()]

    def in_virtual_time(self, works: list[Work]) -> float:
        if self.long:
            pools: FixedPools | None = FixedPools(self.fixed - self.long, self.long, LONG)
        else:
            pools = fixed_number(self.fixed, ordered=not self.by_hand) if self.fixed else None
        return Simulation(works, [KV_TOKENS], pools=pools).run().makespan_s


POLICIES = [
    Policy("promptmill", by_hand=False),
    Policy("pools of 150 and 32 by hand", 182, long=32),
    Policy("500 by hand", 500),
]
ALONE = Policy("500 in promptmill's order", 500, by_hand=False)


@contextmanager
def in_force(policy: Policy) -> Iterator[None]:
    """Seconds of the simulated clock, and what is fixed or by hand."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(replica, "_SAMPLE_S", 0.0))  # every poll, that is
        stack.enter_context(patch.object(journal, "_PAUSE_S", journal._PAUSE_S / SPEED))
        if policy.fixed:
            stack.enter_context(patch.object(window, "START", policy.fixed))
            stack.enter_context(patch.object(window.Window, "sample", lambda *_: None))
        if policy.by_hand:
            stack.enter_context(patch.object(prompts, "in_families", lambda items, **_: items))
            stack.enter_context(patch.object(picker.Picker, "finished", lambda *_: None))
        yield


def write(folder: Path, model: Path, works: list[Work]) -> Path:
    by_partition: dict[str, list[str]] = defaultdict(list)
    for work in works:
        row = {"id": work.hash, "messages": list(messages(work))}
        by_partition[work.partition].append(json.dumps(row) + "\n")
    command = [sys.executable, "-m", "benchmarks.fixed_lengths", str(folder)]
    text = PROFILE.format(
        model=model,
        command=json.dumps([*command, "--sim-speed", str(SPEED)]),
        poll_s=POLL_S / SPEED,
        stream_interval=STREAM_INTERVAL,
        kv_tokens=KV_TOKENS,
        folder=folder,
    )
    for name, lines in sorted(by_partition.items()):
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        length_class = "long" if name in LONG else "short"
        text += PARTITION.format(name=name, folder=folder, length_class=length_class)
    path = folder / "profile.toml"
    path.write_text(text, encoding="utf-8")
    return path


def messages(work: Work) -> Iterator[dict[str, str]]:
    """Of about as many tokens as the workload says; a family's system message is the same for all of it."""
    if work.shared_tokens:
        yield {"role": "system", "content": work.family + " rule" * (work.shared_tokens - OWN_TOKENS)}
    own = work.prompt_tokens - work.shared_tokens - OWN_TOKENS
    yield {"role": "user", "content": work.hash + " word" * max(1, own)}


def measure(
    path: Path, policy: Policy, manifests: list[Manifest], wanted: dict[str, int]
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """Its figures, and output ids by prompt hash."""
    folder = path.parent
    store = f"store.url={folder / policy.name.replace(' ', '-')}"
    profile = load_profile(str(path), [*policy.settings(), store])
    with in_force(policy), Run.open(profile, RunRequest(), "benchmark") as run:
        run.accept(manifests)
        with run.mill(manifests) as mill:
            (server,) = run.servers.launch()
            mill.attach(server, run.servers.pass_gate(server, run.longest_request_tokens(manifests)))
            began, cpu, busy = time.monotonic(), time.process_time(), busy_s(folder)
            waiters = [threading.Thread(target=mill.generate, args=(m.partition,)) for m in manifests]
            each(waiters, threading.Thread.start)
            widest = queued = looks = 0
            while not isinstance(mill.wait(0.5), Finished):
                figures = mill.figures()
                widest, looks = max(widest, figures.in_flight), looks + 1
                queued += sum(server.queued or 0 for server in figures.servers)
            seconds, busy = time.monotonic() - began, busy_s(folder) - busy
            cpu_s = time.process_time() - cpu
            each(waiters, threading.Thread.join)
            figures = mill.figures()
        answers = run.store.lookup(wanted)
    output_ids = {prompt_hash: answer.output_ids for prompt_hash, answer in answers.items()}
    tokens = sum(map(len, output_ids.values()))
    result = {
        "of_right_length": sum(len(ids) == wanted[prompt_hash] for prompt_hash, ids in output_ids.items()),
        "wall_s": round(seconds, 1),
        "simulated_s": round(busy),
        "tokens_per_simulated_s": round(tokens / busy),
        "most_in_flight": widest,
        "mean_queue": round(queued / max(1, looks)),
        "retractions": figures.retractions,
        "driver_cpu_s": round(cpu_s, 1),
    }
    return result, output_ids


def prepared(path: Path) -> list[Manifest]:
    """Once for all policies: they ask the same prompts."""
    run = Run.read(load_profile(str(path), []), RunRequest())
    return [prepare(run.preparation(name)) for name in run.partitions]


def write_lengths(folder: Path, manifests: Iterable[Manifest], works: list[Work]) -> dict[str, int]:
    """For the server; returns the tokens of an answer by prompt hash."""
    tokens = {work.hash: work.output_tokens for work in works}
    rows = [row for manifest in manifests for row in read_prompts(manifest)]
    lengths = {digest(row.input_ids): tokens[row.id] for row in rows}
    (folder / "lengths.json").write_text(json.dumps(lengths), encoding="utf-8")
    return {row.prompt_hashes[0][0]: tokens[row.id] for row in rows}


def each(threads: list[threading.Thread], action: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        action(thread)


def main() -> None:
    works = read_workload(PROMPTS)
    policies = [*POLICIES, *([] if QUICK else [ALONE])]
    results: list[dict[str, Any]] = []
    outputs = []
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name), sim_model(Path(name)), works)
        manifests = prepared(path)
        wanted = write_lengths(Path(name), manifests, works)
        for policy in policies:
            result, ids = measure(path, policy, manifests, wanted)
            results.append(result)
            outputs.append(ids)
    compare(results, [policy.in_virtual_time(works) for policy in policies])
    right = all(ids == outputs[0] for ids in outputs)
    right &= all(result["of_right_length"] == PROMPTS for result in results)
    named = {policy.name: result for policy, result in zip(policies, results, strict=True)}
    load = [round(n, 2) for n in os.getloadavg()]
    whole = {"benchmark": "window", "prompts": PROMPTS, "policies": named, "right": right, "load": load}
    print(json.dumps(whole, indent=1))


def compare(results: list[dict[str, Any]], virtual: list[float]) -> None:
    """Each with the first."""
    ours = results[0]
    for result, virtual_s in zip(results, virtual, strict=True):
        result["ratio"] = round(result["simulated_s"] / ours["simulated_s"], 3)
        result["ratio of wall_s"] = round(result["wall_s"] / ours["wall_s"], 3)
        result["ratio in virtual time"] = round(virtual_s / virtual[0], 3)


if __name__ == "__main__":
    main()
