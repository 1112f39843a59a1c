"""Some rounds of `make fuzz`, always the same ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from promptmill.chat import ChatRenderer
from promptmill.prompts import arrays
from tests.fuzz.readers import play


def test_broken_input_gives_rows_rejects_or_a_config_error(
    renderer: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_BLOCK", arrays._BLOCK)  # rounds change it
    ends: Counter[str] = Counter()
    for number in range(70):
        ends += play(number, renderer, tmp_path)
    assert ends["files"] > 30
    assert ends["errors"] > 5
    assert ends["prompts"] > 30
