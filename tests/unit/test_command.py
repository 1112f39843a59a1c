"""From settings to argv and environment, and the port."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from promptmill.errors import ConfigError, LaunchFailed
from promptmill.model import EMBEDDED, resolve_model
from promptmill.serving.command import (
    EMBEDDED_COMMAND,
    LaunchCommand,
    Life,
    build_command,
    check_engine,
    context_tokens,
    render_flag,
)
from promptmill.serving.process import choose_port
from promptmill.serving.server import Server, foreign, launch, read_tail
from promptmill.settings import Profile
from tests.helpers_store import MODEL, make_profile

MODULE = ("-m", "sglang.launch_server")


@pytest.fixture
def make(tmp_path: Path):
    def made(**server: Any) -> Profile:
        return make_profile(tmp_path, server={"engine": "llama_cpp", **server})

    return made


LIFE = Life("life-1", 1, "k", Path("servers"))


def build(profile: Profile, life: Life = LIFE) -> LaunchCommand:
    return build_command(profile, MODEL, life, profile.server.flags, profile.server.env)


@pytest.mark.parametrize(
    ("flag", "value", "argv"),
    [
        ("tp-size", 8, ["--tp-size", "8"]),
        ("mem-fraction-static", 0.88, ["--mem-fraction-static", "0.88"]),
        ("--jinja", True, ["--jinja"]),
        ("jinja", False, []),
        ("lora", ["a", "b"], ["--lora", "a", "b"]),
        ("name", "", ["--name", ""]),
    ],
)
def test_render_flag_gives_argv(flag: str, value: Any, argv: list[str]) -> None:
    assert render_flag(flag, value) == argv


def test_build_command_appends_flags_after_the_command_and_keeps_the_key_out_of_argv(make) -> None:
    profile = make(flags={"parallel": 2, "jinja": True}, env={"OMP_NUM_THREADS": "3"})
    built = build(profile, Life("life-1", 8123, "s3cret-key", Path("servers")))
    assert built.argv[: len(EMBEDDED_COMMAND)] == EMBEDDED_COMMAND
    rest = built.argv[len(EMBEDDED_COMMAND) :]
    assert rest[rest.index("--model") + 1] == MODEL.path
    assert rest[rest.index("--port") + 1] == "8123"
    assert rest[rest.index("--alias") + 1] == "life-1"
    assert rest[-3:] == ["--parallel", "2", "--jinja"]
    assert not any("s3cret-key" in part for part in built.argv)
    assert built.env["LLAMA_API_KEY"] == "s3cret-key"
    assert built.env["OMP_NUM_THREADS"] == "3"


def test_build_command_takes_a_command_of_ones_own_and_a_template(make) -> None:
    profile = make(command=["docker", "run", "image"])
    profile = profile.model_copy(update={"chat": profile.chat.model_copy(update={"template": "t.jinja"})})
    argv = build(profile).argv
    assert argv[:3] == ["docker", "run", "image"]
    assert argv[argv.index("--chat-template-file") + 1] == "t.jinja"


def test_build_command_inherits_the_environment(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTMILL_TEST_INHERITED", "yes")
    assert build(make()).env["PROMPTMILL_TEST_INHERITED"] == "yes"


@pytest.mark.parametrize(
    ("server", "setting"),
    [
        ({"engine": "sglang", "command": ["no-such-program"]}, "no-such-program"),
        ({"engine": "sglang", "command": [sys.executable, *MODULE]}, "has no sglang"),
        ({"engine": "sglang", "version": "0.5.23", "flags": {"api-key": "x"}}, "api-key"),
        ({"restart_command": ["true"]}, r"restart_command"),
        ({"engine": "openai"}, r"server\.urls"),
        ({"replicas": 2}, r"server\.replicas"),
        ({"engine": "openai", "urls": ["http://h:1"], "api_key_env": "NOT_SET_HERE"}, "NOT_SET_HERE"),
    ],
)
def test_check_engine_names_the_setting_that_cannot_work(make, server: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError, match=setting):
        check_engine(make(**server))


def test_check_engine_names_the_engine_of_the_embedded_model() -> None:
    with pytest.raises(ConfigError, match="llama_cpp"):
        check_engine(Profile(model="embedded:smollm2", partitions=[{"name": "A", "source": "a.jsonl"}]))


def test_check_engine_takes_what_works(make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_HERE", "x")
    check_engine(make())
    check_engine(make(engine="openai", urls=["http://h:1", "http://h:2"], api_key_env="SET_HERE"))


def test_context_tokens_is_a_slots_share_of_the_context(make) -> None:
    assert context_tokens(make(), MODEL) == 4096
    assert context_tokens(make(flags={"ctx-size": 4096, "parallel": 1}), MODEL) == 4096
    assert context_tokens(make(engine="openai", urls=["http://h:1"]), MODEL) is None


def test_context_tokens_is_no_more_than_the_model_has(make) -> None:
    weights = resolve_model(
        Profile.model_validate({"model": EMBEDDED, "partitions": [{"name": "a", "source": "a.jsonl"}]})
    )
    assert context_tokens(make(flags={"ctx-size": 24000, "parallel": 2}), weights) == 8192


@pytest.mark.parametrize("value", [0, -1, "many", True, 1.5])
def test_context_tokens_names_a_flag_that_is_no_number(make, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"server\.flags\.parallel"):
        context_tokens(make(flags={"parallel": value}), MODEL)


def test_choose_port_finds_a_free_one_for_zero() -> None:
    port = choose_port(0)
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_choose_port_names_a_port_that_is_taken(host: str) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"server\.port {port}"):
            choose_port(port)
    assert choose_port(port) == port, "free again"


def test_launch_on_a_port_that_is_taken_starts_nothing_and_sends_nothing(make, tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        folder = tmp_path / "servers"
        with pytest.raises(ConfigError, match=str(port)):
            launch(make(port=port, command=["false"]), MODEL, folder, 1)
        assert not folder.exists()
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_launch_names_each_life_and_hands_over_key_port_and_cleanup(make, tmp_path: Path) -> None:
    show = 'echo "$LLAMA_API_KEY $*"'
    cleaned = tmp_path / "cleaned-{name}"
    profile = make(command=["sh", "-c", show, "sh"], cleanup=["touch", str(cleaned)])
    lives = []
    for life in (1, 2):
        server = launch(profile, MODEL, tmp_path / "servers", life)
        assert server.process is not None
        try:
            assert server.process.wait(20)
            assert not server.alive
        finally:
            server.stop(0)
        lives.append(server)
        [line] = server.log_tail()
        assert line.startswith(server.api_key + " ")
        assert f"--port {server.url.rpartition(':')[2]} --alias {server.name}" in line
        assert (tmp_path / f"cleaned-{server.name}").exists()
    assert lives[0].name != lives[1].name
    assert lives[0].api_key != lives[1].api_key


def test_launch_of_a_command_that_does_not_exist_says_so(make, tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match="no-such-command"):
        launch(make(command=["no-such-command-here"]), MODEL, tmp_path, 1)


def test_foreign_server_takes_its_key_from_the_environment_and_is_never_stopped(
    make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_KEY", "k")
    server: Server = foreign(make(engine="openai", api_key_env="THEIR_KEY"), "http://host:1/v1")
    assert (server.url, server.api_key, server.alive, server.log_tail()) == ("http://host:1", "k", True, [])
    server.stop(0)
    assert foreign(make(engine="openai"), "http://host:1/v1/").url == "http://host:1"


def test_read_tail_takes_the_last_lines_of_a_log_of_any_length(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_tail(log, 3) == []
    log.write_bytes(b"".join(b"line %d\n" % i for i in range(50_000)) + b"\xff broken")
    assert read_tail(log, 3) == ["line 49998", "line 49999", "\ufffd broken"]
