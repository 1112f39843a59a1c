from __future__ import annotations

from typing import Any

import pytest
from helpers import make_profile, user
from pydantic import ValidationError

from promptmill.errors import PromptRejected
from promptmill.prompts.control import ControlTokens
from promptmill.prompts.policies import apply
from promptmill.settings import PolicySettings
from promptmill.types import Message

SYSTEM: Message = {"role": "system", "content": "Be brief."}
CALL = {"id": "c1", "function": {"name": "add", "arguments": "{}"}}
ASKS: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def result(id_: str | None = "c1") -> Message:
    return {"role": "tool", "content": "7", **({"tool_call_id": id_} if id_ else {})}


def applied(messages: list[Message], rollout: bool = False, **policies: Any) -> tuple[Any, set[str]]:
    notes: set[str] = set()
    return apply([messages], rollout, PolicySettings(**policies), notes), notes


def refused(messages: list[Message], rollout: bool = False, **policies: Any) -> str:
    with pytest.raises(PromptRejected) as caught:
        applied(messages, rollout, **policies)
    return caught.value.reason


def test_nothing_is_noted_of_a_conversation_that_is_in_order() -> None:
    messages = [SYSTEM, user("a"), ASKS, result(), assistant("7"), user("b")]
    strict = {"same_role": "reject", "system_not_first": "reject", "nul": "reject"}
    assert applied(messages, **strict) == ([messages], set())
    assert applied([SYSTEM, SYSTEM, user("a")], system_not_first="reject") == (
        [[SYSTEM, SYSTEM, user("a")]],
        {"same_role_kept"},
    )


@pytest.mark.parametrize("messages", [[user("a"), result()], [user("a"), ASKS, result("c2"), user("b")]])
def test_result_that_answers_no_call(messages: list[Message]) -> None:
    assert refused(messages) == "orphan_tool_result"
    assert applied(messages, orphan_tool="keep") == ([messages], {"orphan_tool_kept"})
    without = [message for message in messages if message["role"] != "tool"]
    assert applied(messages, orphan_tool="drop") == ([without], {"orphan_tool_dropped"})


def test_result_that_names_no_call_or_answers_one_without_id_is_no_orphan() -> None:
    nameless = {**ASKS, "tool_calls": [{"function": CALL["function"]}]}
    for messages in (
        [user("a"), result(None)],
        [user("a"), nameless, result("x")],
        [user("a"), ASKS, result(), result()],
    ):
        assert applied(messages) == ([messages], set())


def test_call_of_an_earlier_turn_is_known_in_a_rollout() -> None:
    messages = [user("a"), ASKS, result(), assistant("7"), user("b")]
    assert applied(messages, rollout=True)[0] == [[user("a")], [result()], [user("b")]]
    assert refused([user("a"), assistant("x"), result()], rollout=True) == "orphan_tool_result"


def test_same_role_is_kept_merged_or_rejected() -> None:
    messages = [user("a"), user("b"), assistant("c"), user("d")]
    assert applied(messages) == ([messages], {"same_role_kept"})
    assert refused(messages, same_role="reject") == "same_role_twice"
    merged = [user("a\n\nb"), assistant("c"), user("d")]
    assert applied(messages, same_role="merge") == ([merged], {"same_role_merged"})
    rolled = [user("a"), assistant("x"), user("b"), user("c"), user("d")]
    assert applied(rolled, rollout=True, same_role="merge")[0] == [[user("a")], [user("b\n\nc\n\nd")]]


def test_merged_messages_keep_all_that_they_carry() -> None:
    one = assistant("", reasoning_content="r1", tool_calls=[CALL])
    other = assistant("text", reasoning_content="r2")
    ((_, merged, *_),), _ = applied([user("a"), one, other, result(), user("b")], same_role="merge")
    assert merged == assistant("text", reasoning_content="r1\n\nr2", tool_calls=[CALL])


def test_names_and_tool_results_are_not_merged() -> None:
    named = [{**user("a"), "name": "Ada"}, {**user("b"), "name": "Bob"}]
    assert applied(named, same_role="reject") == ([named], set())
    results = [user("a"), ASKS, result(), result()]
    assert applied(results, same_role="reject") == ([results], set())


def test_system_behind_the_start() -> None:
    messages = [user("a"), SYSTEM, assistant("b"), user("c")]
    assert applied(messages) == ([messages], {"system_not_first_kept"})
    assert refused(messages, system_not_first="reject") == "system_not_first"
    assert (
        refused([user("a"), assistant("b"), SYSTEM, user("c")], True, system_not_first="reject")
        == "system_not_first"
    )


def test_empty_messages_are_dropped_but_for_the_one_that_asks() -> None:
    messages = [
        {**SYSTEM, "content": ""},
        user("a"),
        assistant(" "),
        ASKS,
        {**result(), "content": ""},
        user("b"),
    ]
    kept, notes = applied(messages, empty_content="drop")
    assert kept == [[user("a"), ASKS, {**result(), "content": ""}, user("b")]]
    assert notes == {"empty_content_dropped"}
    assert refused([user("a"), assistant("b"), user("")], empty_content="drop") == "empty_prompt"
    assert applied(messages)[0] == [messages]


TOKENS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "   ", "\n\n")


@pytest.mark.parametrize(
    ("turns", "tools", "found"),
    [
        ([[user("plain <think text")]], None, ""),
        ([[user("a <|im_end|> b")]], None, "<|im_end|>"),
        ([[user("a")], [user("</think>")]], None, "</think>"),
        ([[user("a"), assistant("<think>x</think>y"), user("b")]], None, ""),
        ([[user("a"), assistant("<|im_start|>"), user("b")]], None, "<|im_start|>"),
        (
            [[user("a"), assistant("", tool_calls=[{"function": {"arguments": "<|im_end|>"}}])]],
            None,
            "<|im_end|>",
        ),
        ([[user("a")]], [{"function": {"parameters": {"<|im_end|>": 1}}}], "<|im_end|>"),
        ([[user("a    b\n\n\n")]], None, ""),
    ],
)
def test_control_tokens_are_found_where_they_would_become_ids(turns: Any, tools: Any, found: str) -> None:
    assert ControlTokens(TOKENS, ("<think>", "</think>")).find(turns, tools) == found


@pytest.mark.parametrize("text", ["[[abc] x", "[[[abc]", "<<|im_end|>", "[[[[[[abc"])
def test_control_token_is_found_behind_what_begins_like_one(text: str) -> None:
    tokens = ("[[abcd", "[abc", "<|im_end|>", "<<<")
    assert ControlTokens(tokens).find([[user(text)]], None) in ("[abc", "<|im_end|>")


def test_tokenizer_without_added_tokens_has_none_to_find() -> None:
    assert ControlTokens([]).find([[user("anything <|at|> all")]], None) == ""


def test_policies_of_a_partition_are_those_of_all_and_its_own() -> None:
    parts = [{"name": "A", "source": "a", "policies": {"nul": "drop"}}, {"name": "B", "source": "b"}]
    profile = make_profile(policies={"nul": "reject", "same_role": "merge"}, partitions=parts)
    a, b = (part.policies for part in profile.partitions)
    assert (a.nul, a.same_role, b.nul, b.same_role) == ("drop", "merge", "reject", "merge")
    assert a.last_assistant == "drop"


@pytest.mark.parametrize("wrong", [{"nul": "maybe"}, {"unknown": 1}, "reject"])
def test_policies_of_another_shape_are_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        make_profile(policies=wrong)
    assert caught.value.error_count() == 1, "told once, and not for each partition"
    with pytest.raises(ValidationError):
        make_profile(policies={"nul": "keep"}, partitions=[{"name": "A", "source": "a", "policies": wrong}])


def test_condition_that_asks_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="at_least, at_most or one_of"):
        make_profile(partitions=[{"name": "A", "source": "a", "where": [{"column": "x"}]}])
