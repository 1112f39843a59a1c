"""README's commands, run in a copy of the repository as a newcomer runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from place import BIN, ROOT, TEST_S, Place

pytestmark = [pytest.mark.engine, pytest.mark.timeout(TEST_S)]


def commands() -> list[str]:
    """Every line of README's shell blocks, without its comment."""
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def copy_of_the_repository(place: Place) -> None:
    """The tracked files and those that will be, with the .venv that these tests run in."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (place.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place.folder / name)  # times as well: make looks at them
    for name in ("pyproject.toml", "constraints.txt"):
        os.utime(place.folder / name, (0, 0))  # or make would install this copy into the .venv that it shares
    (place.folder / ".venv").symlink_to(BIN.parent)


def test_readme_commands_work_and_the_demo_survives_its_crash(place: Place) -> None:
    if not (ROOT / ".git").exists() or not (BIN.parent / ".cpu").exists():
        pytest.skip("wants a clone in which make has built .venv")
    copy_of_the_repository(place)
    shutil.copytree(place.folder / "prefect", place.folder / "data/demo/prefect")
    place.env["PYTHONPATH"] = str(place.folder)
    outputs = {}
    for command in commands():
        if command == "make test":  # this is it
            assert place.run("make", "--dry-run", "test").returncode == 0
            continue
        done = place.run("sh", "-c", command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stderr == "", command
        outputs[command] = done.stdout

    demo = outputs["make demo"]
    for words in ("[chaos] killing the server", "SERVER DIED", "resuming: ", "released ", "reasoning ("):
        assert words in demo
    assert "nothing new" in outputs[".venv/bin/promptmill run demo"]
    accounting = json.loads(outputs[".venv/bin/promptmill status demo --json"])["partitions"]
    assert sum(part["rows"] for part in accounting.values()) == 50
    assert all(part["pending"] == part["failed"] == 0 for part in accounting.values())
    assert place.wait_until_empty(0) == []
    changed = place.run("git", "-C", str(ROOT), "status", "--porcelain", "--", "data", ".venv")
    assert changed.stdout == ""
