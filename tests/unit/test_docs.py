"""The documents against the project: what they name exists, and what is generated is up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(title) for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def tree_of(page: Path) -> list[str]:
    """The paths in the first column of the tree."""
    text = page.read_text(encoding="utf-8")
    tree = text.partition("## The tree")[2].split("```")[1]
    return [line.split()[0] for line in tree.splitlines() if line.strip()]


def test_settings_page_is_what_the_script_prints() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "make_settings.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert made.stdout == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), "run `make docs`"


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_point_at_what_exists(page: Path) -> None:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_tree_names_what_exists() -> None:
    paths = tree_of(ROOT / "CONTRIBUTING.md")
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_tree_leaves_out_no_module_of_the_top_level() -> None:
    named = set(tree_of(ROOT / "CONTRIBUTING.md"))
    for folder in ("flows", "tasks", "promptmill"):
        modules = {f"{folder}/{file.name}" for file in (ROOT / folder).glob("*.py")}
        packages = {f"{folder}/{init.parent.name}/" for init in (ROOT / folder).glob("*/__init__.py")}
        assert modules | packages <= named | {f"{folder}/__init__.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_prose_exist(page: Path) -> None:
    """Paths in backticks that start at a folder of the project."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    for path in re.findall(r"`((?:promptmill|flows|tasks|tests|docs|deployments)/[\w./-]*)`", prose):
        assert (ROOT / path).exists(), path
