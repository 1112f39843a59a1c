from __future__ import annotations

from typing import Any

import pytest
from helpers import MODEL, user

from promptmill.model import Model
from promptmill.prompts.hashing import PromptHasher, digest_of
from promptmill.settings import SamplingSettings

BASE = {"temperature": 0.7, "top_p": 0.95, "seed": 1}


def hash_of(
    ids: tuple[int, ...] = (5, 6, 7),
    sample: int = 0,
    model: Model = MODEL,
    renderer: str = "r",
    **sampling: Any,
) -> str:
    return PromptHasher(model, renderer, SamplingSettings(**{**BASE, **sampling}))(list(ids), sample)


def chain(later: list[Any], first: str = "f", renderer: str = "r") -> list[str]:
    return PromptHasher(MODEL, renderer, SamplingSettings()).chain(first, later)


def test_hash_is_the_same_in_every_process() -> None:
    # Changing this value makes every store in the world start anew: SCHEMA_VERSION has to change with it.
    assert hash_of() == "486b0ab20fe99a8b91f27fc8ee79689909c2bb4166d9b9b954521aa9c998c74c"


@pytest.mark.parametrize(
    "change",
    [
        {"ids": (5, 6, 8)},
        {"ids": (5, 6)},
        {"ids": (5, 6, 7, 0)},
        {"ids": (7, 6, 5)},
        {"sample": 1},
        {"model": Model("other/model", "revision-1", "/weights")},
        {"model": Model("some/model", "revision-2", "/weights")},
        {"temperature": 1.0},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"stop": ["\n"]},
        {"stop_token_ids": [2]},
        {"seed": 2},
        {"ebnf": "root ::= [a-z]"},
    ],
)
def test_hash_changes_with_the_request(change: dict[str, Any]) -> None:
    assert hash_of(**change) != hash_of()


@pytest.mark.parametrize(
    "change",
    [
        {"model": Model("some/model", "revision-1", "/mnt/elsewhere")},
        {"renderer": "another template that rendered the same ids"},
        {"samples": 4},
        {"top_k": None},
    ],
)
def test_hash_ignores_what_does_not_change_the_request(change: dict[str, Any]) -> None:
    assert hash_of(**change) == hash_of()


def test_hash_takes_a_whole_number_for_the_same_fraction() -> None:
    assert hash_of(temperature=1) == hash_of(temperature=1.0)


def test_messages_stand_in_for_ids_that_only_their_server_knows() -> None:
    hasher = PromptHasher(MODEL, "r", SamplingSettings())
    said, tools = [user("hi")], [{"type": "function", "function": {"name": "f"}}]
    hashes = [
        hasher.of_messages(said, None, {}, 0),
        hasher.of_messages(said, None, {}, 1),
        hasher.of_messages([user("ho")], None, {}, 0),
        hasher.of_messages(said, tools, {}, 0),
        hasher.of_messages(said, None, {"thinking": False}, 0),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hasher.of_messages([{"content": "hi", "role": "user"}], None, {}, 0) == hashes[0]


def test_later_turns_hash_their_history() -> None:
    one, other = chain([[user("b")], [user("c")]]), chain([[user("B")], [user("c")]])
    assert one[0] == other[0] == "f"
    assert len({*one, *other}) == 5
    assert chain([[user("b")], [user("x")]])[:2] == one[:2]


def test_later_turns_hash_the_first_answer_and_the_renderer() -> None:
    later = [[user("b")]]
    assert len({chain(later)[1], chain(later, first="g")[1], chain(later, renderer="s")[1]}) == 3


def test_later_turns_ignore_the_order_of_keys() -> None:
    assert chain([[user("b")]]) == chain([[dict(reversed(user("b").items()))]])


def test_digest_depends_on_order_and_boundaries() -> None:
    assert len({digest_of(parts) for parts in (["a", "b"], ["b", "a"], ["ab"], ["a"], [])}) == 5
