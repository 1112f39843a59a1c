"""A run that finds everything done: what the store, `status`, `run` and memory cost then.

    .venv/bin/python benchmarks/bench_resume.py [--quick] [--folder DIR] [--rows 88000] [--segment-rows 100]

Prints one JSON object. Five partitions are prepared, and every answer is written through the store's own code
into segments of --segment-rows rows: a run seals every few minutes, so that there are hundreds of them. A
first `promptmill run` publishes the release; what is measured comes after it. The Prefect server is started
here. `server.command` leaves a file behind if it is ever called, and the prompts' files keep their times:
from these is read that no server was launched and nothing rendered. --folder keeps what was made, for
another look. --quick: an eighth of the rows, everything measured once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from promptmill.model import resolve_model
from promptmill.profile import load_profile
from promptmill.prompts.hashing import digest_of
from promptmill.prompts.manifest import make_current, prepare, read_prompts
from promptmill.run import Run, RunRequest
from promptmill.settings import Profile
from promptmill.store.objects import LocalFolder
from promptmill.store.segments import Segments
from promptmill.types import Answer, Manifest
from tests.contract.sglang_place import sim_model

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NAMES = ("B1_glaive", "B2_opencodeinstruct", "B3_agent", "B4_deepseek", "B5_synth")
QUICK = "--quick" in sys.argv
ROWS = 11_000 if QUICK else 88_000
HELD = (1_000, 20_000) if QUICK else (1_000, 88_000, 400_000)
TIMES = 1 if QUICK else 3
WORDS = ("rivers", "maps", "asks", "how", "many", "bridges", "the", "old", "town", "has", "who", "built")
PROFILE = """
model = "HuggingFaceTB/SmolLM2-135M-Instruct"
model_path = "{folder}/weights/model"
[server]
engine = "sglang"
version = "0.5.23"
command = ["/bin/sh", "-c", "touch {folder}/launched; exit 1"]
[chat]
template = "{root}/deployments/demo/chat_template.jinja"
[classes.short]
max_new_tokens = 256
[store]
url = "{folder}/store"
[release]
url = "{folder}/release"
"""
PARTITION = """
[[partitions]]
name = "{name}"
source = "{folder}/{name}.jsonl"
"""

STORE = """
import json, sys, time, psutil
from promptmill.profile import load_profile
from promptmill.prompts.manifest import load_current
from promptmill.store.store import Store
profile = load_profile(sys.argv[1], [])
me = psutil.Process()
before, cpu, start = me.memory_info().rss, time.process_time(), time.perf_counter()
store = Store(profile)
store.refresh()
opened = time.perf_counter()
manifests = [load_current(store.manifests, part.name) for part in profile.partitions]
pending = sum(store.tally(m).pending for m in manifests)
end = time.perf_counter()
print(json.dumps({
    "open_s": round(opened - start, 2), "say_s": round(end - opened, 2), "sum_s": round(end - start, 2),
    "cpu_s": round(time.process_time() - cpu, 2), "pending": pending,
    "rss_growth_mb": round((me.memory_info().rss - before) / 1e6, 1)}))
"""

HOLD = """
import gc, json, sys, psutil
from promptmill.settings import Profile
from promptmill.store.store import Store
def opened(url):
    store = Store(Profile(model="m", store={"url": url}, partitions=[{"name": "P", "source": "p"}]))
    store.refresh()
    gc.collect()
    return store, psutil.Process().memory_info()
warm, before = opened(sys.argv[1])
held, after = opened(sys.argv[2])
growth = after.rss - before.rss
print(json.dumps({"rss_mb": round(after.rss / 1e6, 1), "growth_mb": round(growth / 1e6, 1)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--segment-rows", type=int, default=100)
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.resolve()
        path = folder / "profile.toml"
        made = make(folder, args.rows, args.segment_rows)
        api = stack.enter_context(prefect_server(folder))
        first = run(path, api)
        result = {
            "benchmark": "resume",
            "rows": args.rows,
            "segments": len(Segments(LocalFolder(str(folder / "store"))).names()),
            "making_s": made,
            "first_run_s": first,
            "store_first_time": first_time(path),
            "store": [in_a_process(STORE, str(path)) for _ in range(TIMES)],
            "status_s": [timed(["status", str(path)], {}) for _ in range(TIMES)],
            "run": [watched(path, api) for _ in range(TIMES)],
            "held": {n: held(folder, n) for n in HELD},
            "load_1min": round(os.getloadavg()[0], 2),
        }
    print(json.dumps(result, indent=1))


# --- making the place


def make(folder: Path, rows: int, segment_rows: int) -> dict[str, float]:
    """Prompts, prepared partitions and answers below `folder`, unless they are there; seconds of each."""
    if (folder / "made").exists():
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").mkdir()
    sim_model(folder / "weights")
    share = rows // len(NAMES)
    text = PROFILE.format(folder=folder, root=ROOT)
    for name in NAMES:
        rng = random.Random(name)
        lines = (json.dumps({"id": f"{name}-{n}", "prompt": phrase(rng, n)}) for n in range(share))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        text += PARTITION.format(name=name, folder=folder)
    (folder / "profile.toml").write_text(text, encoding="utf-8")
    profile = load_profile(str(folder / "profile.toml"), [])
    start = time.perf_counter()
    reading = Run.read(profile, RunRequest())
    manifests = [prepare(reading.preparation(name)) for name in NAMES]
    for manifest in manifests:
        make_current(manifest, reading.store.manifests)
    prepared = time.perf_counter()
    for manifest in manifests:
        answer_all(profile, manifest, segment_rows)
    (folder / "made").touch()
    return {"prepare": round(prepared - start, 1), "answers": round(time.perf_counter() - prepared, 1)}


def phrase(rng: random.Random, n: int) -> str:
    return f"{n}: " + " ".join(rng.choices(WORDS, k=rng.randint(8, 30)))


def answer_all(profile: Profile, manifest: Manifest, segment_rows: int) -> None:
    """Answers of about 90 tokens, in the order of the rows, as a run would leave them."""
    segments, model, rng = Segments(LocalFolder(profile.store.url)), resolve_model(profile), random.Random(1)
    answers = (
        make_answer(
            row.prompt_hashes[0][0], manifest.partition, list(row.input_ids), rng, model.name, model.revision
        )
        for row in read_prompts(manifest)
    )
    while some := list(islice(answers, segment_rows)):
        segments.write(manifest.partition, sorted(some, key=lambda answer: answer.prompt_hash))


def make_answer(
    prompt_hash: str, partition: str, prompt_ids: list[int], rng: random.Random, model: str, revision: str
) -> Answer:
    ids = [rng.randrange(49_000) for _ in range(rng.randint(40, 140))]
    status, reason = ("truncated", "length") if rng.random() < 0.03 else ("answered", "stop")
    return Answer(
        prompt_hash=prompt_hash,
        partition=partition,
        sample=0,
        turn=0,
        status=status,
        finish_reason=reason,
        flags=[],
        prompt_ids=prompt_ids,
        output_ids=ids,
        reasoning=phrase(rng, len(ids)),
        content=phrase(rng, len(ids)) + phrase(rng, 1),
        prompt_tokens=len(prompt_ids),
        completion_tokens=len(ids),
        reasoning_tokens=len(ids) // 2,
        resumed_tokens=0,
        max_new_tokens=256,
        model=model,
        model_revision=revision,
        kv_dtype="bfloat16",
        server="life-1",
        created_at="2026-11-01T00:00:00.000+00:00",
    )


@contextlib.contextmanager
def prefect_server(folder: Path) -> Iterator[dict[str, str]]:
    """A server of our own, as somebody has one running; yields the environment that finds it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/api"
    dropped = ("PREFECT_", "PROMPTMILL_", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    env |= {"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    env |= {"DO_NOT_TRACK": "1"}
    command = [str(BIN / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "prefect.log").open("wb") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 180
        while not answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < deadline, (folder / "prefect.log").read_text()
            time.sleep(0.2)
        yield {**env, "PREFECT_API_URL": url}
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


# --- measuring


def in_a_process(code: str, *arguments: str) -> dict[str, Any]:
    """What `code` prints as JSON, run in a new process."""
    command = [sys.executable, "-c", code, *arguments]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(out))


def first_time(path: Path) -> dict[str, Any]:
    """The store as it is opened where its keys were never read."""
    (path.parent / "store/journal-keys.npz").unlink(missing_ok=True)
    return in_a_process(STORE, str(path))


def timed(arguments: list[str], env: dict[str, str]) -> float:
    start = time.perf_counter()
    command = [str(BIN / "promptmill"), *arguments]
    subprocess.run(command, cwd=ROOT, env=env or None, capture_output=True, check=True)
    return round(time.perf_counter() - start, 2)


def run(path: Path, env: dict[str, str]) -> float:
    return timed(["run", str(path)], env)


def watched(path: Path, env: dict[str, str]) -> dict[str, Any]:
    """One run; and whether it launched, rendered or published anything."""
    folder = path.parent
    before = prompt_files(folder), (folder / "release/latest.json").stat().st_mtime_ns
    command = [str(BIN / "promptmill"), "run", str(path)]
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=said) as child,
    ):
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        text = said.read()
    return {
        "s": round(time.perf_counter() - start, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "max_rss_mb": round(used.ru_maxrss / 1e3, 1),
        "exit_status": child.returncode,
        "nothing_new": "(nothing new)" in text,
        "launched": (folder / "launched").exists(),
        "prompts_untouched": prompt_files(folder) == before[0],
        "release_untouched": (folder / "release/latest.json").stat().st_mtime_ns == before[1],
        "load_1min": round(os.getloadavg()[0], 2),
    }


def prompt_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file of prepared prompts."""
    found = sorted((folder / "store/journal-manifests").glob("*.parquet"))
    assert len(found) == len(NAMES), found
    return {path.name: ((stat := path.stat()).st_ino, stat.st_mtime_ns) for path in found}


def held(folder: Path, answers: int) -> dict[str, Any]:
    """Resident memory of a process that holds a store with so many answers, and what they added to it."""
    stores = [folder / "held" / str(n) for n in (10, answers)]
    for store, n in zip(stores, (10, answers), strict=True):
        if not (store / "made").exists():
            shutil.rmtree(store, ignore_errors=True)
            segments, rng = Segments(LocalFolder(str(store))), random.Random(2)
            made = (
                make_answer(digest_of([str(i)]), "P", [1, 2, 3], rng, "m", "r") for i in islice(count(), n)
            )
            for first in made:
                segments.write("P", chain([first], islice(made, 4999)))
            (store / "made").touch()
    return in_a_process(HOLD, *map(str, stores))


if __name__ == "__main__":
    main()
