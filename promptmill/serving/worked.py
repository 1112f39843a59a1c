"""Remedies that worked, remembered for the next run on the same model, GPUs and version of SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptmill.files import written_whole
from promptmill.settings import FlagValue


@dataclass(frozen=True, slots=True)
class Remedy:
    """One flag that was changed, and what the profile said when it was."""

    flag: str
    profile_value: FlagValue | None
    value: FlagValue | None
    why: str

    def __str__(self) -> str:
        before = "unset" if self.profile_value is None else self.profile_value
        after = "unset" if self.value is None else self.value
        return f"{self.flag} {before} → {after} ({self.why})"


class WorkedRemedies:
    """A small JSON file beside the journal. A torn one is as none: what it holds can be found again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, key: str, profile_values: Mapping[str, FlagValue]) -> list[Remedy]:
        """Those for `key`, without the flags that the profile has changed since."""
        known = [Remedy(**entry) for entry in self._read().get(key, [])]
        return [r for r in known if profile_values.get(r.flag) == r.profile_value]

    def keep(self, key: str, remedies: list[Remedy]) -> None:
        """In place of what was known for `key`."""
        data = self._read()
        data[key] = [
            {"flag": r.flag, "profile_value": r.profile_value, "value": r.value, "why": r.why}
            for r in remedies
        ]
        with written_whole(self._path) as file:
            file.write(json.dumps(data, indent=1).encode())

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        try:
            data = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}
