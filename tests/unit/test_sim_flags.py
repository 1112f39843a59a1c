"""The simulator's command line is SGLang's, by version."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptmill.sim import flags

_MODEL = ["--model-path", "m"]


def test_flags_are_those_of_the_server() -> None:
    given = "--tp 8 --context-length 128k --mem-fraction-static 0.88 --enable-hicache"
    given += " --cuda-graph-max-bs-decode 64 --attention-backend triton --sim-speed 50"
    args, sim = flags.parse([*_MODEL, *given.split()])
    assert (args["tp_size"], args["context_length"], args["mem_fraction_static"]) == (8, 131_072, 0.88)
    assert args["enable_hierarchical_cache"]
    assert "--tp 8" in args["launch_command"]
    assert sim.sim_speed == 50


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--cuda-graph-max-bs", "64"], "ambiguous option: --cuda-graph-max-bs could match"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--kv-cache-dtype", "fp4_e2m1"], "invalid choice: 'fp4_e2m1'"),
        (["--sim-version", "0.5.9", "--cuda-graph-max-bs-decode", "64"], "unrecognized arguments"),
    ],
)
def test_a_wrong_flag_ends_with_two(given: list[str], words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        flags.parse([*_MODEL, *given])
    assert end.value.code == 2
    assert words in capfd.readouterr().err


def test_old_flags_belong_to_the_old_version() -> None:
    args, _ = flags.parse(
        [*_MODEL, "--sim-version", "0.5.9", "--cuda-graph-max-bs", "64", "--kv-cache-dtype", "fp4_e2m1"]
    )
    assert args["cuda_graph_max_bs"] == 64


def test_a_config_file_lies_under_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "# ours\nmodel-path: from-file\nport: 1234\napi_key: 'se-cret'\nenable-metrics: true\n"
        "skip-server-warmup: false\ncuda-graph-bs-decode: [1, 2, 4]\n"
    )
    args, _ = flags.parse(["--config", str(path), "--port", "4321"])
    assert (args["model_path"], args["port"], args["api_key"]) == ("from-file", 4321, "se-cret")
    assert args["enable_metrics"] and not args["skip_server_warmup"]
    assert args["cuda_graph_bs_decode"] == [1, 2, 4]


def test_help_lists_the_flags_that_matter_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parse(["--help"])
    out = capsys.readouterr().out
    assert "--max-total-tokens" in out
    assert "--sim-fault" in out
    assert "--speculative-num-steps" not in out
    assert len(out.splitlines()) < 120
