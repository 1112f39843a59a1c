"""A small profile on the embedded engine, and commands run as a user runs them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# Bounds that end what hangs, on any machine: no test is about how long a run takes.
GIVE_UP_S = 600.0
TEST_S = 1200.0

PROFILE = """
model = "embedded:smollm2"
[server]
engine = "llama_cpp"
startup_timeout_s = 120
[server.flags]
parallel = 4
ctx-size = 4096
[chat]
template = "{root}/deployments/demo/chat_template.jinja"
[sampling]
temperature = 0.6
seed = 3
ebnf = '''root ::= [^<]{{5,20}} "\\n" <[9617]> <[17400]> <[46]> "\\n\\n" [^<]{{5,30}}'''
[classes.short]
max_new_tokens = 64
[store]
url = "data/store"
[release]
url = "data/release"
[[partitions]]
name = "A_text"
source = "a.jsonl"
[[partitions]]
name = "B_turns"
source = "b.jsonl"
"""
TOPICS = ("rain", "bread", "rivers", "clocks", "maps", "tea", "bridges", "salt")
ROWS = {"A_text": len(TOPICS), "B_turns": 2}
ANSWERS = ROWS["A_text"] + 2 * ROWS["B_turns"]


@dataclass
class Place:
    """A folder to run commands in, with a Prefect home and a mark on every process started from it."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def api_url(self) -> str:
        """Of the Prefect API that commands use; empty where a run brings its own."""
        return self.env.get("PREFECT_API_URL", "")

    def environ(self) -> dict[str, str]:
        dropped = ("PREFECT_", "PROMPTMILL_", "PYTHONDONTWRITEBYTECODE")
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        return {
            **inherited,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "TEST_MARK": self.mark,
            **self.env,
        }

    def run(self, *command: str, timeout_s: float = GIVE_UP_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *command: str, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environ(), stdout=output, stderr=subprocess.STDOUT
            )

    def processes(self) -> list[psutil.Process]:
        """Every living process that was started from here, however far down."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_until_empty(self, timeout_s: float = 60) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.processes(), timeout=timeout_s)
        return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition: Callable[[], bool], what: str, every_s: float = 0.05) -> None:
    """Poll, bounded: what is waited for happens in another process."""
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {GIVE_UP_S} s: {what}"
        time.sleep(every_s)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:  # a worker that misses its own signal is Prefect's affair
        process.kill()
        process.wait()


@contextmanager
def prefect_server(place: Place) -> Iterator[None]:
    """A Prefect server in `place`, which its commands use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    place.env["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    server = place.start("prefect", "server", "start", "--port", str(port), "--no-ui", log="server.log")

    def healthy() -> bool:
        assert server.poll() is None, (place.folder / "server.log").read_text()
        try:
            return httpx.get(f"{place.api_url}/health", trust_env=False, timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(healthy, "Prefect server", 0.2)
        yield
    finally:
        end(server)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Prefect home with its database made, to be copied. It takes ten seconds: one for all workers."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    done = folder / "migrated"
    with (folder / "migrated.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            home = Place(tmp_path_factory.mktemp("home"))
            made = home.run("prefect", "server", "database", "upgrade", "-y")
            assert made.returncode == 0, made.stdout + made.stderr
            (home.folder / "prefect").rename(done)
    return done


@pytest.fixture(scope="module")
def shared_api(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One Prefect server for the runs of a module: else each brings its own, for eight seconds of CPU."""
    there = Place(tmp_path_factory.mktemp("api"))
    shutil.copytree(migrated, there.folder / "prefect")
    with prefect_server(there):
        yield there


@pytest.fixture
def place(tmp_path: Path, migrated: Path) -> Iterator[Place]:
    here = Place(tmp_path)
    shutil.copytree(migrated, tmp_path / "prefect")
    yield here
    leftover = here.processes()
    for process in leftover:
        process.kill()
    psutil.wait_procs(leftover, timeout=10)


def write_small(folder: Path) -> None:
    """small.toml with a prompt a topic, and two conversations of two turns."""
    (folder / "small.toml").write_text(PROFILE.format(root=ROOT), encoding="utf-8")
    texts = [{"id": f"a-{topic}", "prompt": f"Tell me something about {topic}."} for topic in TOPICS]
    turns = [
        {"id": f"b-{t}", "turns": [f"What is {t} for?", "And who needs it?"]}
        for t in TOPICS[: ROWS["B_turns"]]
    ]
    for name, rows in (("a.jsonl", texts), ("b.jsonl", turns)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def small(place: Place) -> Place:
    """`place` with small.toml."""
    write_small(place.folder)
    return place
