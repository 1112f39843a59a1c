"""A stand-in for docker: a daemon that owns its containers, and a client that is neither parent nor mark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers_store import python, start_python, until

WAIT_S = 60

# Wishes are files, BOX.run with the command in it and BOX.rm; they are met in the order of their making. It
# ends with its standard input, and its containers with it.
DAEMON = """
import contextlib, json, os, pathlib, signal, subprocess, sys, threading
folder = pathlib.Path(sys.argv[1])
(folder / "up.new").write_text(str(os.getpid()))
(folder / "up.new").rename(folder / "up")
running = {}

def end(name):
    if name in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running[name].pid, signal.SIGKILL)
        running.pop(name).wait()

over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.wait(0.01):
    wishes = [path for path in folder.iterdir() if path.suffix in (".run", ".rm")]
    for wish in sorted(wishes, key=lambda path: path.stat().st_mtime_ns):
        name = wish.stem
        if wish.suffix == ".run":
            with (folder / f"{name}.out").open("wb") as out:
                running[name] = subprocess.Popen(
                    json.loads(wish.read_text()), env={}, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            (folder / f"{name}.new").write_text(str(running[name].pid))
            (folder / f"{name}.new").rename(folder / f"{name}.pid")
        else:
            end(name)
            (folder / f"{name}.removed").touch()
        wish.unlink()
    for name in [name for name, child in running.items() if child.poll() is not None]:
        end(name)
        (folder / f"{name}.exited").touch()
for name in list(running):
    end(name)
"""
# CLIENT FOLDER run BOX COMMAND… shows what the container prints, to its end; CLIENT FOLDER rm BOX ends it.
CLIENT = """
import json, pathlib, sys, time
folder, what, box = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
(folder / f"{box}.wish-{what}").write_text(json.dumps(sys.argv[4:]))
(folder / f"{box}.wish-{what}").rename(folder / f"{box}.{what}")
ends = [folder / f"{box}.removed"] + [folder / f"{box}.exited"] * (what == "run")
out = None
over = False
began = time.monotonic()
while not over:
    over = any(end.exists() for end in ends) or what == "rm" and time.monotonic() - began > 30
    if what == "run" and out is None and (folder / f"{box}.out").exists():
        out = (folder / f"{box}.out").open("rb", buffering=0)
    while out and (piece := out.read(1 << 16)):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
    time.sleep(0.01)
"""


def client(folder: Path, what: str, box: str, *command: str) -> list[str]:
    """The command line of `docker run` or `docker rm -f`."""
    return python(CLIENT, str(folder), what, box, *command)


def container(folder: Path, box: str) -> psutil.Process:
    """The main process of the container; it is waited for."""
    until((folder / f"{box}.pid").exists, WAIT_S, "the container")
    return psutil.Process(int((folder / f"{box}.pid").read_text()))


def inside(folder: Path) -> list[psutil.Process]:
    """Every process of every container that runs."""
    return psutil.Process(int((folder / "up").read_text())).children(recursive=True)


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[Path]:
    """The folder of a daemon that is up."""
    folder = tmp_path / "docker"
    folder.mkdir()
    daemon = start_python(DAEMON, str(folder))
    until((folder / "up").exists, WAIT_S, "the daemon")
    yield folder
    _, complaints = daemon.communicate(timeout=WAIT_S)
    assert daemon.returncode == 0, complaints
