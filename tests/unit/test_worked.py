"""Remedies that worked are remembered, for as long as the profile says what it said."""

from __future__ import annotations

from pathlib import Path

from promptmill.serving.worked import Remedy, WorkedRemedies

STEP = Remedy("mem-fraction-static", 0.93, 0.88, "CUDA out of memory under load")


def test_remedy_is_found_by_key_and_survives_a_new_process(tmp_path: Path) -> None:
    WorkedRemedies(tmp_path / "r.json").keep("kimi | 8 x H200", [STEP])
    again = WorkedRemedies(tmp_path / "r.json")
    assert again.find("kimi | 8 x H200", {"mem-fraction-static": 0.93}) == [STEP]
    assert again.find("kimi | 8 x B200", {"mem-fraction-static": 0.93}) == []


def test_remedy_is_dropped_when_the_profile_says_something_else(tmp_path: Path) -> None:
    worked = WorkedRemedies(tmp_path / "r.json")
    worked.keep("k", [STEP, Remedy("chunked-prefill-size", None, 4096, "again")])
    assert worked.find("k", {"mem-fraction-static": 0.85}) == [
        Remedy("chunked-prefill-size", None, 4096, "again")
    ]


def test_torn_file_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"k": [', encoding="utf-8")
    worked = WorkedRemedies(tmp_path / "r.json")
    assert worked.find("k", {}) == []
    worked.keep("k", [STEP])
    assert worked.find("k", {"mem-fraction-static": 0.93}) == [STEP]


def test_remedy_says_what_changed_and_why() -> None:
    assert str(STEP) == "mem-fraction-static 0.93 → 0.88 (CUDA out of memory under load)"
