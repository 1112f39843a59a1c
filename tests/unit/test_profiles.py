"""The profiles that ship, as SGLang 0.5.9 and 0.5.23 would be started with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptmill.model import Model
from promptmill.profile import load_profile
from promptmill.serving.command import Life, build_command
from promptmill.settings import Profile

KIMI = ("kimi-k2.5-h200", "kimi-k2.5-96gb")
MODEL = Model("moonshotai/Kimi-K2.5", "0" * 40, "/data/models/kimi-k2.5")


def argv(profile: Profile, version: str) -> list[str]:
    profile = profile.model_copy(update={"server": profile.server.model_copy(update={"version": version})})
    life = Life("promptmill-1", 30000, "key", Path("servers"))
    return build_command(profile, MODEL, life, profile.server.flags, profile.server.env).argv


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
@pytest.mark.parametrize("name", KIMI)
def test_kimi_profile_gives_a_command_of_full_names(name: str, version: str) -> None:
    command = argv(load_profile(name, []), version)
    assert command[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    flags = [part for part in command if part.startswith("--")]
    assert len(flags) == len(set(flags))
    value = {flag: command[command.index(flag) + 1] for flag in flags if flag != command[-1]}
    assert value["--tp-size"] == "8"
    assert value["--mem-fraction-static"] == "0.88"
    assert value["--schedule-conservativeness"] == "0.3"
    assert value["--host"] == "127.0.0.1"
    assert "--trust-remote-code" in flags
    assert "--enable-hierarchical-cache" not in flags
    assert "--kv-cache-dtype" not in flags  # the model's own
    assert ("--stream-output" in flags) == (version == "0.5.9")
    assert ("--incremental-streaming-output" in flags) == (version == "0.5.23")


@pytest.mark.parametrize("name", KIMI)
def test_kimi_profile_says_that_it_never_ran_on_cards(name: str) -> None:
    text = (Path("deployments") / f"{name}.toml").read_text(encoding="utf-8")
    assert "NEVER RUN ON CARDS" in text.partition("model =")[0]


def test_kimi_96gb_asks_for_triton_and_h200_for_the_default() -> None:
    assert "triton" in argv(load_profile("kimi-k2.5-96gb", []), "0.5.23")
    assert "--attention-backend" not in argv(load_profile("kimi-k2.5-h200", []), "0.5.23")
