"""What a person sees on a terminal of 80 columns."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from promptmill.console import print_accounting
from promptmill.types import STATUSES, Tally


def test_accounting_on_a_narrow_terminal_cuts_no_heading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    long = "C3_" + "agent_" * 6
    print_accounting([Tally("B5_questions", Counter(answered=1_200_000)), Tally(long, Counter())])
    printed = capsys.readouterr().out
    for word in ("partition", "rows", *STATUSES, "B5_questions", "1200000"):
        assert word in printed
    assert "…" not in printed
