"""SGLang's flags under the names of each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptmill.errors import ConfigError
from promptmill.serving.command import Life, build_command, context_tokens, secrets, vocabulary
from promptmill.serving.sglang_flags import NEW, OLD, for_version, parse_version, streaming_flags
from tests.helpers_store import MODEL, make_profile

LIFE = Life("promptmill-1", 30000, "the-key-of-this-life", Path("/run/servers"))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.9.post1", (0, 5, 9)),
        ("0.5.10rc0", (0, 5, 100)),
        ("", None),
        ("main", None),
    ],
)
def test_parse_version_takes_three_numbers(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_for_version_renames_what_has_another_name_there() -> None:
    old = {"cuda-graph-max-bs": 64, "tp": 8}
    assert for_version(old, NEW) == {"cuda-graph-max-bs-decode": 64, "tp-size": 8}
    assert for_version({"cuda-graph-max-bs-decode": 64}, OLD) == {"cuda-graph-max-bs": 64}
    assert for_version(old, (0, 5, 15)) == {"cuda-graph-max-bs": 64, "tp-size": 8}
    assert for_version(old, None) == for_version(old, NEW)


@pytest.mark.parametrize("flag", ["--tp", "tp", "tensor-parallel-size", "tp_size", "--tp-size"])
def test_for_version_gives_full_names(flag: str) -> None:
    assert for_version({flag: 8}, NEW) == {"tp-size": 8}


@pytest.mark.parametrize("flag", ["api-key", "--api_key", "port", "model", "config", "served-model-name"])
def test_for_version_refuses_what_promptmill_sets_itself(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        for_version({flag: "x"}, NEW)


def test_for_version_refuses_one_flag_under_two_names() -> None:
    with pytest.raises(ConfigError, match="tp-size is set twice"):
        for_version({"tp": 8, "tp-size": 4}, NEW)


def test_for_version_never_changes_the_kv_dtype_but_says_what_there_is() -> None:
    assert for_version({"kv-cache-dtype": "fp4_e2m1"}, OLD) == {"kv-cache-dtype": "fp4_e2m1"}
    with pytest.raises(ConfigError, match=r"no 'fp4_e2m1'; it has: .*nvfp4"):
        for_version({"kv-cache-dtype": "fp4_e2m1"}, NEW)
    with pytest.raises(ConfigError, match="no 'mxfp8'"):
        for_version({"kv-cache-dtype": "mxfp8"}, OLD)


def test_streaming_flags_ask_for_new_tokens_only() -> None:
    assert streaming_flags(NEW, 32) == {"stream-interval": 32, "incremental-streaming-output": True}
    assert streaming_flags(OLD, 8) == {"stream-interval": 8, "stream-output": True}


def sglang(tmp_path: Path, **changes: Any) -> Any:
    server = {"engine": "sglang", "version": "0.5.23", **changes.pop("server", {})}
    return make_profile(tmp_path, server=server, **changes)


def test_build_command_hands_the_key_over_in_a_file_and_nowhere_else(tmp_path: Path) -> None:
    profile = sglang(tmp_path, server={"flags": {"tp": 8}, "env": {"NCCL_DEBUG": "WARN"}})
    built = build_command(profile, MODEL, LIFE, profile.server.flags, profile.server.env)
    assert built.argv[:3] == ["python", "-m", "sglang.launch_server"]
    flags = dict(zip(built.argv[3::1], built.argv[4::1], strict=False))
    assert flags["--served-model-name"] == "promptmill-1"
    assert flags["--host"] == "127.0.0.1"
    assert flags["--port"] == "30000"
    assert flags["--tp-size"] == "8"
    assert flags["--model-path"] == MODEL.path
    assert flags["--revision"] == MODEL.revision
    assert "--enable-metrics" in built.argv
    assert "--trust-remote-code" not in built.argv
    assert built.files == {Path("/run/servers/promptmill-1.yaml"): "api-key: the-key-of-this-life\n"}
    assert flags["--config"] == "/run/servers/promptmill-1.yaml"
    assert not any("the-key-of-this-life" in part for part in [*built.argv, *built.env.values()])
    assert built.env["NCCL_DEBUG"] == "WARN"


def test_build_command_puts_the_lifes_name_into_a_command(tmp_path: Path) -> None:
    command = ["docker", "run", "--name", "{name}", "image", "python", "-m", "sglang.launch_server"]
    profile = sglang(tmp_path, trust_remote_code=True, server={"command": command})
    built = build_command(profile, MODEL, LIFE, {}, {})
    assert built.argv[:4] == ["docker", "run", "--name", "promptmill-1"]
    assert "--trust-remote-code" in built.argv


def test_secrets_are_the_key_and_what_the_environment_holds(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    profile = sglang(tmp_path, server={"env": {"WANDB_API_KEY": "wandb-secret", "SOME_PATH": "/not/secret"}})
    found = secrets(profile, LIFE)
    assert {"the-key-of-this-life", "hf_0123456789", "wandb-secret"} <= set(found)
    assert "/not/secret" not in found


def test_limits_come_from_flags_and_the_models_config(tmp_path: Path) -> None:
    from promptmill.model import Model

    (tmp_path / "config.json").write_text(
        '{"text_config": {"max_position_embeddings": 262144, "vocab_size": 163840}}', encoding="utf-8"
    )
    model = Model("kimi", "1", str(tmp_path))
    assert context_tokens(sglang(tmp_path), model) == 262142
    assert context_tokens(sglang(tmp_path, server={"flags": {"context-length": "32k"}}), model) == 32766
    assert context_tokens(sglang(tmp_path), MODEL) is None
    assert vocabulary(model, 200_000) == 163840
    assert vocabulary(MODEL, 200_000) == 200_000
