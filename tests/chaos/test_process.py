"""No orphans, ever: real processes, ended in every way that a process can be ended."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from promptmill.errors import LaunchFailed
from promptmill.serving.keeper import LIFE_MARK
from promptmill.serving.process import ServerProcess, end_leftovers
from tests.chaos.containers import CLIENT, client, container
from tests.helpers_store import python, start_python, until

WAIT_S = 60
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
# Prints its own pid and those of a child in its group and of one that left the group by setsid.
FAMILY = """
import os, sys, time
pids = [os.getpid()]
for leaves in (False, True):
    pid = os.fork()
    if pid == 0:
        if leaves:
            os.setsid()
        time.sleep(600)
        os._exit(0)
    pids.append(pid)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(" ".join(map(str, pids)))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
# A child that leaves the group, under a title that takes the room of the environment: what setproctitle does.
RENAMED = """
import ctypes, os, pathlib, sys, time
child = os.fork()
if child == 0:
    os.setsid()
    if "SPT_NOENV" not in os.environ:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
OWNER = """
import json, sys
from pathlib import Path
from promptmill.serving.keeper import LIFE_MARK
from promptmill.serving.process import ServerProcess
folder = Path(sys.argv[1])
server = ServerProcess("life-1", json.loads(sys.argv[2]), folder / "life-1.log", folder)
server.start(cleanup=json.loads(sys.argv[3]))
print(server.pid, flush=True)
sys.stdin.read()
"""

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers of `python -c`; whatever is left of them is ended."""
    started: list[ServerProcess] = []

    def start_one(code: str, *arguments: str, cleanup: tuple[str, ...] = ()) -> ServerProcess:
        name = f"life-{len(started)}"
        server = ServerProcess(name, python(code, *arguments), tmp_path / f"{name}.log", tmp_path / "state")
        started.append(server)
        server.start(cleanup=cleanup)
        return server

    yield start_one
    for server in started:
        if server.pid:
            server.stop(0)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that owns a server, as a run does; it is ended by pid."""
    started: list[subprocess.Popen[str]] = []

    def start_owner(command: list[str], cleanup: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        started.append(start_python(OWNER, str(tmp_path), json.dumps(command), json.dumps(cleanup)))
        return started[-1]

    yield start_owner
    for process in started:
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        process.wait(WAIT_S)


def is_up(server: ServerProcess) -> bool:
    return server.log.exists() and "up" in server.log.read_text()


def up(server: ServerProcess) -> psutil.Process:
    until(lambda: is_up(server), WAIT_S, "the server is up")
    return psutil.Process(server.pid)


def family(path: Path) -> list[psutil.Process]:
    until(path.exists, WAIT_S, "the server wrote its pids")
    return [psutil.Process(int(pid)) for pid in path.read_text().split()]


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(mark: str) -> list[int]:
    """Pids of everything alive that belongs to that life, the keeper too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(LIFE_MARK) == mark and lives(process):
                found.append(process.pid)
    return found


def assert_gone(processes: list[psutil.Process], timeout_s: float = WAIT_S) -> None:
    try:
        until(lambda: not any(map(lives, processes)), timeout_s, "all of them are gone")
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def state_files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("status", [0, 3])
def test_process_that_ends_by_itself_reports_its_exit_status(start: Start, status: int) -> None:
    server = start(f"raise SystemExit({status})")
    assert server.wait(WAIT_S)
    assert (server.alive, server.exit_status) == (False, status)


def test_process_that_is_killed_reports_the_signal(start: Start) -> None:
    server = start(SLEEP)
    up(server)
    assert (server.alive, server.exit_status, server.wait(0)) == (True, None, False)
    server.kill()
    assert server.wait(WAIT_S)
    assert server.exit_status == -signal.SIGKILL


def test_stop_sends_sigterm_and_lets_the_process_finish(start: Start, tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('goodbye', flush=True), sys.exit(7)))\n" + SLEEP
    )
    server = start(code)
    process = up(server)
    server.stop(60)
    assert server.exit_status == 7
    assert server.log.read_text().split() == ["up", "goodbye"]
    assert not lives(process)
    assert state_files(tmp_path) == []


def test_stop_kills_after_the_grace_what_ignores_sigterm(start: Start) -> None:
    server = start(STUBBORN)
    process = up(server)
    server.stop(0.2)
    assert server.exit_status == -signal.SIGKILL
    assert not lives(process)


def test_stop_leaves_nothing_of_the_group_and_nothing_that_left_it(start: Start, tmp_path: Path) -> None:
    server = start(FAMILY, str(tmp_path / "pids"))
    processes = family(tmp_path / "pids")
    assert len(processes) == 3
    assert all(map(lives, processes))
    server.stop(5)
    assert_gone(processes, 0.5)


def test_stop_of_a_server_that_is_gone_and_a_second_stop_do_nothing(start: Start) -> None:
    server = start("pass")
    assert server.wait(WAIT_S)
    server.stop(60)
    server.stop(60)
    assert server.exit_status == 0


def test_crash_takes_the_workers_that_the_main_process_left(start: Start, tmp_path: Path) -> None:
    server = start(FAMILY, str(tmp_path / "pids"))
    processes = family(tmp_path / "pids")
    server.kill()
    assert server.wait(WAIT_S)
    assert_gone(processes, 0.5)


def test_server_sees_default_signals_and_no_terminal(start: Start) -> None:
    server = start(
        "import os, signal, sys\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler,"
        " signal.getsignal(signal.SIGHUP) == signal.SIG_DFL,"
        " os.getsid(0) == os.getpid(), sys.stdin.read() == '')"
    )
    assert server.wait(WAIT_S)
    assert server.log.read_text().split() == ["True"] * 4


def test_server_gets_the_environment_that_is_given(tmp_path: Path) -> None:
    code = "import os; print(os.environ['GIVEN'], 'HOME' in os.environ)"
    server = ServerProcess("life", python(code), tmp_path / "log", tmp_path)
    server.start(env={"GIVEN": "yes"})
    try:
        assert server.wait(WAIT_S)
    finally:
        server.stop(0)
    assert server.log.read_text().split() == ["yes", "False"]


def test_log_is_appended_with_both_streams(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "life.log"
    for number in range(2):
        code = f"import sys; print('out', {number}, flush=True); print('err', file=sys.stderr)"
        server = ServerProcess("life", python(code), log, tmp_path)
        server.start()
        assert server.wait(WAIT_S)
        server.stop(0)
    assert log.read_text().splitlines() == ["out 0", "err", "out 1", "err"]


def test_command_that_does_not_exist_is_a_failed_launch_that_names_it(tmp_path: Path) -> None:
    server = ServerProcess("life", ["/no/such/command", "--flag"], tmp_path / "log", tmp_path / "state")
    with pytest.raises(LaunchFailed, match="/no/such/command: No such file or directory"):
        server.start()
    assert state_files(tmp_path) == []


def test_command_that_may_not_be_executed_is_a_failed_launch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no program")
    server = ServerProcess("life", [str(tmp_path / "file")], tmp_path / "log", tmp_path / "state")
    with pytest.raises(LaunchFailed, match="Permission denied"):
        server.start()


def test_cleanup_runs_with_the_name_in_it_before_stop_returns(start: Start, tmp_path: Path) -> None:
    server = start(SLEEP, cleanup=("touch", str(tmp_path / "cleaned-{name}-{name}")))
    up(server)
    server.stop(5)
    assert (tmp_path / f"cleaned-{server.name}-{server.name}").exists()


@pytest.mark.parametrize("cleanup", [("/no/such/command",), ("false",)])
def test_cleanup_that_fails_hinders_nothing(start: Start, cleanup: tuple[str, ...]) -> None:
    server = start(SLEEP, cleanup=cleanup)
    process = up(server)
    server.stop(5)
    assert server.exit_status == -signal.SIGTERM
    assert not lives(process)


def test_cleanup_that_failed_when_the_owner_was_killed_is_tried_again_by_the_next_run(
    owner: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    tried, done = tmp_path / "tried", tmp_path / "done"
    once_more = f"test -e {tried} && touch {done} || {{ touch {tried}; false; }}"
    run = owner(python(FAMILY, str(tmp_path / "pids")), ("sh", "-c", once_more))
    processes = family(tmp_path / "pids")
    keeper = processes[0].parent()
    assert keeper is not None
    run.kill()
    run.wait(WAIT_S)
    assert_gone([*processes, keeper])
    assert (tried.exists(), done.exists()) == (True, False)
    assert state_files(tmp_path) == ["life-1.json"]
    assert end_leftovers(tmp_path) == []
    assert done.exists()
    assert state_files(tmp_path) == []


def test_owner_killed_by_sigkill_takes_server_and_all_its_descendants_along(
    owner: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    cleanup = ("touch", str(tmp_path / "cleaned-{name}"))
    run = owner(python(FAMILY, str(tmp_path / "pids")), cleanup)
    processes = family(tmp_path / "pids")
    keeper = processes[0].parent()
    assert keeper is not None
    run.send_signal(signal.SIGKILL)
    assert_gone([*processes, keeper])
    assert (tmp_path / "cleaned-life-1").exists()
    assert run.communicate(timeout=WAIT_S)[1] == "", "nobody complains on the user's terminal"
    assert end_leftovers(tmp_path) == []
    assert state_files(tmp_path) == []


def test_owner_that_exits_takes_the_server_along(
    owner: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = owner(python(FAMILY, str(tmp_path / "pids")))
    processes = family(tmp_path / "pids")
    assert run.stdin is not None
    run.stdin.close()
    assert run.wait(WAIT_S) == 0
    assert_gone(processes)


def test_owner_interrupted_from_the_terminal_leaves_the_server_to_its_owner(
    start: Start, tmp_path: Path
) -> None:
    server = start(SLEEP)
    process = up(server)
    keeper = process.parent()
    assert keeper is not None
    for ignored in (signal.SIGINT, signal.SIGHUP):
        keeper.send_signal(ignored)
    assert not server.wait(0.3)
    assert lives(process)


def test_keeper_killed_by_sigkill_ends_the_server(start: Start, tmp_path: Path) -> None:
    server = start(STUBBORN)
    process = up(server)
    keeper = process.parent()
    assert keeper is not None
    keeper.kill()
    assert server.wait(WAIT_S)
    assert_gone([process])
    assert server.exit_status == -signal.SIGKILL
    server.stop(5)
    assert state_files(tmp_path) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.04, 0.06, 0.1])
def test_keeper_killed_while_it_starts_leaves_nothing(delay_s: float, tmp_path: Path) -> None:
    server = ServerProcess("life-0", python(SLEEP), tmp_path / "log", tmp_path / "state")

    def begin() -> None:
        with suppress(LaunchFailed):
            server.start()

    starting = threading.Thread(target=begin)
    starting.start()
    until(lambda: marked(server._mark), WAIT_S, "the keeper")
    time.sleep(delay_s)
    os.kill(server._keeper.pid, signal.SIGKILL)
    starting.join(WAIT_S)
    server.stop(0)
    assert marked(server._mark) == []


def test_start_that_is_interrupted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ServerProcess("life-0", python(STUBBORN), tmp_path / "log", tmp_path / "state")

    def interrupted(timeout: float | None = None) -> bool:
        until(lambda: is_up(server), WAIT_S, "the server is up")
        raise KeyboardInterrupt

    monkeypatch.setattr(server._started, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.start(files={tmp_path / "key.yaml": "api-key: x"})
    assert marked(server._mark) == []
    assert not (tmp_path / "key.yaml").exists()
    assert state_files(tmp_path) == []


def test_keeper_killed_by_sigkill_ends_what_renamed_itself_as_sglang_does(
    start: Start, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    server = start(RENAMED, str(pids))
    processes = family(pids)
    os.kill(server._keeper.pid, signal.SIGKILL)
    assert server.wait(WAIT_S)
    assert_gone(processes)


def test_keeper_ended_by_sigterm_ends_the_server_and_what_left_it(start: Start, tmp_path: Path) -> None:
    server = start(FAMILY, str(tmp_path / "pids"))
    processes = family(tmp_path / "pids")
    keeper = processes[0].parent()
    assert keeper is not None
    keeper.terminate()
    assert server.wait(WAIT_S)
    assert_gone(processes, 0.5)


def test_end_leftovers_ends_a_server_whose_owner_and_keeper_were_killed_together(
    owner: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    run = owner(python(STUBBORN))
    assert run.stdout is not None
    process = psutil.Process(int(run.stdout.readline()))
    keeper = process.parent()
    assert keeper is not None
    until(lambda: state_files(tmp_path), WAIT_S, "the state file")
    for victim in (keeper, psutil.Process(run.pid)):
        victim.suspend()  # neither may see the other's end
    keeper.kill()
    run.kill()
    run.wait(WAIT_S)
    try:
        assert lives(process), "nobody was left to end it"
        assert end_leftovers(tmp_path) == ["life-1"]
        assert_gone([process])
        assert end_leftovers(tmp_path) == []
        assert state_files(tmp_path) == []
    finally:
        assert_gone([process], 0)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    """Somebody else's process, in a session of its own."""
    child = subprocess.Popen(python("import time; time.sleep(600)"), start_new_session=True)
    yield psutil.Process(child.pid)
    child.kill()
    child.wait(WAIT_S)


@pytest.fixture
def dead() -> tuple[int, float]:
    """The identity of a process that is gone."""
    child = subprocess.Popen(python("import sys; sys.stdin.read()"), stdin=subprocess.PIPE)
    identity = child.pid, psutil.Process(child.pid).create_time()
    child.communicate(timeout=WAIT_S)
    return identity


def save(folder: Path, server: tuple[int, float], owner: tuple[int, float]) -> Path:
    path = folder / "life-9.json"
    path.write_text(json.dumps({"mark": "life-9", "server": server, "owner": owner}))
    return path


def test_end_leftovers_ends_what_a_dead_owner_left(
    tmp_path: Path, sleeper: psutil.Process, dead: tuple[int, float]
) -> None:
    state = save(tmp_path, (sleeper.pid, sleeper.create_time()), dead)
    assert end_leftovers(tmp_path) == ["life-9"]
    assert_gone([sleeper])
    assert not state.exists()


def test_end_leftovers_never_touches_a_pid_with_another_creation_time(
    tmp_path: Path, sleeper: psutil.Process, dead: tuple[int, float]
) -> None:
    state = save(tmp_path, (sleeper.pid, sleeper.create_time() - 60), dead)
    assert end_leftovers(tmp_path) == []
    assert lives(sleeper)
    assert not state.exists()


def test_end_leftovers_leaves_the_server_of_a_living_owner(tmp_path: Path, sleeper: psutil.Process) -> None:
    mine = os.getpid(), psutil.Process().create_time()
    state = save(tmp_path, (sleeper.pid, sleeper.create_time()), mine)
    assert end_leftovers(tmp_path) == []
    assert lives(sleeper)
    assert state.exists()


def test_end_leftovers_takes_an_owner_whose_pid_was_given_again_as_dead(
    tmp_path: Path, sleeper: psutil.Process
) -> None:
    save(tmp_path, (sleeper.pid, sleeper.create_time()), (os.getpid(), psutil.Process().create_time() - 60))
    assert end_leftovers(tmp_path) == ["life-9"]
    assert_gone([sleeper])


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"server": 1, "owner": 2}', '"x"', "null"])
def test_end_leftovers_removes_a_state_file_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "life-9.json").write_text(text)
    assert end_leftovers(tmp_path) == []
    assert state_files(tmp_path) == []


def test_end_leftovers_of_a_folder_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    assert end_leftovers(tmp_path / "servers") == []


# --- secrets and files of a life


def test_secret_never_reaches_the_log_however_it_is_written(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "key = 'k3y-' + '0123456789abcdef'\n"
        "os.write(1, b'a' * 70000 + key[:7].encode()); time.sleep(0.05)\n"
        "os.write(2, key[7:].encode() + b'\\rprogress ' + key.encode() + b' end\\n')\n"
        "os.write(1, b'k3y-01')\n"
    )
    log = tmp_path / "life.log"
    server = ServerProcess("life", python(code), log, tmp_path / "state")
    server.start(secrets=["k3y-0123456789abcdef", ""])
    assert server.wait(WAIT_S)
    server.stop(0)
    text = log.read_bytes()
    assert b"k3y-0123456789abcdef" not in text
    assert text == b"a" * 70000 + b"***\rprogress *** end\nk3y-01"


@pytest.mark.parametrize("how", ["stop", "server killed", "keeper killed"])
def test_files_of_a_life_are_there_for_the_owner_alone_and_as_long_as_it(how: str, tmp_path: Path) -> None:
    key = tmp_path / "key.yaml"
    code = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text(), 'up', flush=True); " + SLEEP
    server = ServerProcess("life-0", python(code, str(key)), tmp_path / "log", tmp_path / "state")
    server.start(files={key: "api-key: x"})
    up(server)
    assert server.log.read_text().startswith("api-key: x")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    if how == "keeper killed":
        os.kill(server._keeper.pid, signal.SIGKILL)
    elif how == "server killed":
        server.kill()
    else:
        server.stop(0)
    assert server.wait(WAIT_S)
    assert not key.exists()
    server.stop(0)
    assert state_files(tmp_path) == []


def test_command_that_does_not_exist_leaves_no_file(tmp_path: Path) -> None:
    server = ServerProcess("life-0", ["/no/such/command"], tmp_path / "log", tmp_path / "state")
    with pytest.raises(LaunchFailed):
        server.start(files={tmp_path / "key.yaml": "api-key: x"})
    assert sorted(tmp_path.iterdir()) == [tmp_path / "log", tmp_path / "state"]
    assert state_files(tmp_path) == []


def test_keeper_killed_by_sigkill_ends_what_left_the_group_and_cleans_up(
    start: Start, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    server = start(FAMILY, str(pids), cleanup=("touch", str(tmp_path / "cleaned-{name}")))
    members = family(pids)
    os.kill(server._keeper.pid, signal.SIGKILL)
    assert server.wait(WAIT_S)
    assert_gone(members)
    assert (tmp_path / f"cleaned-{server.name}").exists()


# --- what lies outside of the process tree: a container whose client is only a client


@pytest.mark.parametrize("how", ["stop", "flow killed", "keeper killed"])
def test_container_that_outlives_its_client_is_ended_by_the_cleanup(
    how: str, start: Start, owner: Callable[..., subprocess.Popen[str]], docker: Path
) -> None:
    wanted = ("run", "life-0", *python(SLEEP))
    if how == "flow killed":
        flow = owner(client(docker, *wanted), tuple(client(docker, "rm", "life-0")))
        contained = container(docker, "life-0")
        flow.kill()
        flow.wait()
    else:
        server = start(CLIENT, str(docker), *wanted, cleanup=tuple(client(docker, "rm", "{name}")))
        contained = container(docker, "life-0")
        if how == "stop":
            server.stop(1)
            assert not lives(contained)
        else:
            os.kill(server._keeper.pid, signal.SIGKILL)
            assert server.wait(WAIT_S)
    assert_gone([contained])
