from __future__ import annotations

from collections import Counter

import yaml

from promptmill.release.card import accounting_table, note_list, reject_list, write_card
from promptmill.types import Tally

TALLIES = [
    Tally("B1", Counter(answered=1200, truncated=3, rejected=4), {"bad_json": 3, "too_long": 1}),
    Tally("B2", Counter(pending=1)),
]


def card(views: dict[str, int]) -> str:
    return write_card(views, TALLIES, "some/{model}", "revision-1", "0.1.0")


def test_card_has_a_configuration_a_view() -> None:
    head = card({"turns": 5, "conversations": 1234}).split("---\n")[1]
    assert yaml.safe_load(head) == {
        "configs": [
            {
                "config_name": "turns",
                "default": True,
                "data_files": [{"split": "train", "path": "data/turns/*.parquet"}],
            },
            {
                "config_name": "conversations",
                "data_files": [{"split": "train", "path": "data/conversations/*.parquet"}],
            },
        ]
    }


def test_card_says_what_it_is_and_how_to_load_it() -> None:
    text = card({"turns": 5, "conversations": 1234})
    assert "Answers of `some/{model}` (revision `revision-1`), made by promptmill 0.1.0." in text
    assert 'load_dataset("<this folder>", "turns", split="train")' in text
    assert "- `conversations`: 1,234" in text


def test_accounting_has_every_row_in_one_column() -> None:
    assert accounting_table(TALLIES).splitlines() == [
        "| partition | rows | answered | truncated | empty | flagged | rejected | failed | pending |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| B1 | 1,207 | 1,200 | 3 | 0 | 0 | 4 | 0 | 0 |",
        "| B2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 |",
    ]


def test_rejects_are_listed_by_reason() -> None:
    assert reject_list(TALLIES) == "- B1: 3 bad_json\n- B1: 1 too_long"
    assert reject_list(TALLIES[1:]) == "None."


def test_what_policies_did_is_listed() -> None:
    tally = Tally("B1", notes={"surrogates_replaced": 1200})
    line = "- B1: 1,200 surrogates_replaced: half of a surrogate pair became U+FFFD"
    assert note_list([*TALLIES, tally]) == line
    assert note_list(TALLIES) == "None."
