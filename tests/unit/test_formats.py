from __future__ import annotations

import functools
from datetime import date
from typing import Any

import pytest
from helpers import user

from promptmill.errors import ConfigError, PromptRejected
from promptmill.prompts.formats import choose_format, to_conversation
from promptmill.prompts.formats.row import Row
from promptmill.settings import ColumnSettings, PolicySettings
from promptmill.types import Conversation

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"id": "t0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "t0", "content": "7"}


def row_of(data: dict[str, Any], policies: dict[str, Any] | None = None, **columns: str) -> Row:
    return Row(data, "f.jsonl:3", ColumnSettings(**columns), PolicySettings(**(policies or {})))


def chosen(data: dict[str, Any], **columns: str) -> str:
    return choose_format(row_of(data, **columns)).format


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def read(
    data: dict[str, Any], fmt: str = "messages", mode: str | None = None, **columns: str
) -> Conversation:
    return to_conversation(row_of(data, **columns), fmt, mode)


def turns(messages: list[Any], mode: str | None = None) -> list[list[dict[str, Any]]]:
    return read({"messages": messages}, mode=mode).turns


def reason(data: dict[str, Any], fmt: str = "messages", mode: str | None = None, **columns: str) -> str:
    with pytest.raises(PromptRejected) as caught:
        read(data, fmt, mode, **columns)
    return caught.value.reason


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "1", "prompt": "a"}, "text"),
        ({"messages": [user("a")]}, "messages"),
        ({"conversations": [user("a")], "prompt": "a"}, "messages"),
        ({"question": [[user("a")]]}, "messages"),
        ({"turns": ["a", "b"]}, "turns"),
        ({"prompt": ["a", {"role": "user"}]}, "messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "sharegpt"),
        ({"messages": [user("a"), {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"question": [[user("a")]], "function": []}, "bfcl"),
        ({"question": "a", "function": []}, "text"),
        ({"system": "SYSTEM: x", "chat": "USER: a\n\n\nASSISTANT: b"}, "glaive"),
        ({"sample": "SYSTEM: x\nUSER: a\nASSISTANT: b"}, "glaive"),
        ({"input": "a", "output": "b", "unit_tests": "[]", "average_test_score": "1"}, "opencodeinstruct"),
        ({"input": "a", "output": "b"}, "text"),
        ({"prompt": "USER: a\n\n\nASSISTANT: b"}, "text"),
        ({"conversation": [user("a")]}, "messages"),
    ],
)
def test_format_auto_follows_the_value(row: dict[str, Any], expected: str) -> None:
    assert chosen(row) == expected


def test_format_auto_looks_at_the_column_that_is_named() -> None:
    assert chosen({"messages": [user("a")], "q": "text"}, prompt="q") == "text"


def test_format_auto_names_the_columns_where_none_fits() -> None:
    with pytest.raises(ConfigError, match=r"recognised among id, body; set columns\.prompt"):
        chosen({"id": 1, "body": "x"})
    with pytest.raises(ConfigError, match=r"set columns\.prompt"):
        chosen({"prompt": 42})


def test_format_auto_does_not_ask_half_of_a_prompt() -> None:
    with pytest.raises(ConfigError, match="both instruction and input"):
        chosen({"instruction": "Translate.", "input": "Guten Tag"})
    with pytest.raises(ConfigError, match="both instruction and input"):
        chosen({"instruction": "Say hello.", "input": ""})  # a later row has one
    assert chosen({"instruction": "Translate.", "input": "Hallo"}, prompt="instruction") == "text"


@pytest.mark.parametrize("value", [None, []])
def test_format_auto_leaves_an_empty_row_to_the_next_one(value: Any) -> None:
    with pytest.raises(PromptRejected, match="no_messages"):
        chosen({"messages": value})


def test_text_is_the_only_message() -> None:
    row = read({"task_id": "HumanEval/1", "prompt": " def f():\n", "entry": 3}, "text")
    assert row == Conversation("HumanEval/1", [[user(" def f():\n")]], None, "f.jsonl:3")


@pytest.mark.parametrize("value", ["42", "007", "true", "null"])
def test_text_stays_text(value: str) -> None:
    assert read({"prompt": value}, "text").turns == [[user(value)]]


def test_turns_are_rolled_out_by_default() -> None:
    row = {"turns": ["first", "second"]}
    assert read(row, "turns").turns == [[user("first")], [user("second")]]
    assert read(row, "turns", "last_turn").turns == [[user("first"), user("second")]]


def test_messages_keep_what_a_template_may_show() -> None:
    thinks = {**assistant("12"), "reasoning_content": "three fours", "prefix": True, "refusal": None}
    named = {**user("plus 1?"), "name": "Ada"}
    assert turns([SYSTEM, user("3*4?"), thinks, ASKS, RESULT, named]) == [
        [SYSTEM, user("3*4?"), {**assistant("12"), "reasoning_content": "three fours"}, ASKS, RESULT, named]
    ]


def test_messages_from_json_text() -> None:
    text = r'[{"role": "user", "content": "half: \ud83d"}]'
    assert read({"messages": text}).turns == [[user("half: \ufffd")]]
    assert reason({"messages": "[{"}) == "bad_json"
    assert reason({"messages": "[" * 100_000}) == "bad_json"


def test_last_assistant_turns_are_dropped() -> None:
    assert turns([user("Name a prime."), assistant("7")]) == [[user("Name a prime.")]]
    assert turns([user("a"), assistant("b"), assistant("c")]) == [[user("a")]]
    assert turns([user("a"), ASKS, RESULT, assistant("7")]) == [[user("a"), ASKS, RESULT]]


def test_developer_is_the_system() -> None:
    assert turns([{"role": "developer", "content": "policy"}, user("hi")])[0][0]["role"] == "system"


@pytest.mark.parametrize("role", ["bing", "", None, 1, ["user"]])
def test_unknown_role_is_a_reject(role: Any) -> None:
    assert reason({"messages": [user("a"), {"role": role, "content": "x"}, user("b")]}) == "unknown_role"


def test_unknown_role_may_be_mapped_or_dropped() -> None:
    messages = [{"from": "bing", "value": "Hi."}, {"from": "narrator", "value": "…"}, user("a")]
    row = row_of({"messages": messages}, {"roles": {"bing": "assistant"}, "unknown_role": "drop"})
    assert to_conversation(row, "messages", None).turns == [[assistant("Hi."), user("a")]]
    assert row.notes == {"unknown_role_dropped"}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("developer", "system"),
        ("tool", "tool"),
        ("function", "tool"),
        ("observation", "tool"),
        ("function_response", "tool"),
    ],
)
def test_sharegpt_names_of_roles(name: str, role: str) -> None:
    conversation = [
        {"from": "human", "value": "a"},
        {"from": name, "value": "b"},
        {"from": "human", "value": "c"},
    ]
    ((_, message, _),) = read({"conversations": conversation}, "sharegpt").turns
    assert message == {"role": role, "content": "b"}


def test_sharegpt_calls_and_results_find_each_other() -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": "{}"}]
    conversation = [
        {"from": "human", "value": "go"},
        {"from": "function_call", "value": calls},
        {"from": "observation", "value": "1"},
        {"from": "observation", "value": "2"},
        {"from": "tool_call", "value": '{"name": "f", "arguments": {}}'},
        {"from": "observation", "value": "3"},
    ]
    (messages,) = read({"conversations": conversation}, "sharegpt").turns
    ids = [call["id"] for message in messages for call in message.get("tool_calls", [])]
    assert ids == ["functions.f:0", "functions.g:1", "functions.f:2"]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == ids


@pytest.mark.parametrize("value", ["f(1)", None, [], [1], {"arguments": {}}, '{"name": 5}'])
def test_sharegpt_call_that_is_none_is_a_reject(value: Any) -> None:
    conversation = [{"from": "human", "value": "a"}, {"from": "function_call", "value": value}]
    assert reason({"conversations": conversation}, "sharegpt") == "bad_tool_calls"


def test_older_form_of_a_call_is_understood() -> None:
    older = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "7"}
    assert turns([user("a"), older, result]) == [
        [
            user("a"),
            {**assistant(""), "tool_calls": [{"type": "function", "function": older["function_call"]}]},
            {"role": "tool", "name": "f", "content": "7"},
        ]
    ]


def test_bfcl_answers_every_turn() -> None:
    row = {"id": "m0", "question": [[SYSTEM, user("a")], [user("b")]], "function": [{"name": "wx"}]}
    made = read(row, "bfcl")
    assert made.turns == [[SYSTEM, user("a")], [user("b")]]
    assert made.tools == [{"type": "function", "function": {"name": "wx"}}]


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        b"bytes",
        date(2026, 1, 1),
        {1: "a"},
        functools.reduce(lambda v, _: [v], range(500), 0),
    ],
)
def test_what_json_cannot_say_is_a_reject(value: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"v": value}}}
    assert reason({"messages": [user("a")], "tools": [{"name": "f", "v": value}]}) == "bad_tools"
    assert (
        reason({"messages": [user("a"), assistant("") | {"tool_calls": [call]}, user("b")]})
        == "bad_tool_calls"
    )


def test_content_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]
    assert turns([user("x") | {"content": parts}]) == [[user("part onepart two")]]
    assert turns([user("x") | {"content": ["bare", "strings"]}]) == [[user("barestrings")]]
    assert turns([user("x") | {"content": [{"type": "input_text", "text": "new"}]}]) == [[user("new")]]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "?"}],
            "unsupported_modality",
        ),
        ([{"type": "text"}], "bad_content"),
        ([{"text": "a"}], "bad_content"),
        ([5], "bad_content"),
        ({"text": "object content"}, "bad_content"),
        (123, "bad_content"),
        (True, "bad_content"),
        (None, "no_content"),
        ("", "empty_prompt"),
        (" \n\t", "empty_prompt"),
        ([], "empty_prompt"),
    ],
)
def test_content_that_cannot_be_asked_is_a_reject(content: Any, expected: str) -> None:
    assert reason({"messages": [{"role": "user", "content": content}]}) == expected


def test_null_content_is_allowed_beside_tool_calls_only() -> None:
    silent = {**ASKS, "content": None}
    assert turns([user("a"), silent, RESULT])[0][1] == ASKS
    assert reason({"messages": [user("a"), {**silent, "tool_calls": []}, user("b")]}) == "no_content"
    assert reason({"messages": [user("a"), {"role": "assistant"}, user("b")]}) == "no_content"


@pytest.mark.parametrize("calls", ["add(2)", {"name": "add"}, ["add"], [{"function": "add"}]])
def test_tool_calls_of_another_shape_are_a_reject(calls: Any) -> None:
    bad = {**assistant("x"), "tool_calls": calls}
    assert reason({"messages": [user("a"), bad, user("b")]}) == "bad_tool_calls"


@pytest.mark.parametrize(
    ("data", "fmt", "expected"),
    [
        ({"id": "1"}, "messages", "no_prompt"),
        ({"messages": None}, "messages", "no_messages"),
        ({"messages": []}, "messages", "no_messages"),
        ({"messages": {"role": "user"}}, "messages", "no_messages"),
        ({"messages": [user("a"), "stray"]}, "messages", "bad_message"),
        ({"messages": [user("a"), None]}, "messages", "bad_message"),
        ({"messages": [[]]}, "messages", "nothing_to_answer"),
        ({"messages": [SYSTEM]}, "messages", "nothing_to_answer"),
        ({"messages": [SYSTEM, assistant("only assistant")]}, "messages", "nothing_to_answer"),
        ({"messages": [user("a"), assistant("b"), SYSTEM]}, "messages", "nothing_to_answer"),
        ({"prompt": 42}, "text", "not_text"),
        ({"prompt": None}, "text", "not_text"),
        ({"prompt": "  "}, "text", "empty_prompt"),
        ({"turns": "a"}, "turns", "no_messages"),
        ({"turns": ["a", 1]}, "turns", "not_text"),
        ({"turns": ["a", " "]}, "turns", "empty_prompt"),
    ],
)
def test_row_without_a_question_is_a_reject(data: dict[str, Any], fmt: str, expected: str) -> None:
    assert reason(data, fmt) == expected


def test_missing_column_is_named() -> None:
    with pytest.raises(PromptRejected, match="there is no column 'q'"):
        read({"prompt": "a"}, "text", prompt="q")


def test_rollout_splits_at_the_answers_and_drops_them() -> None:
    messages = [SYSTEM, user("a"), assistant("1"), user("b"), user("c"), assistant("2"), assistant("3")]
    assert turns(messages, "rollout") == [[SYSTEM, user("a")], [user("b"), user("c")]]


def test_rollout_replays_tool_results_as_turns_of_their_own() -> None:
    messages = [user("a"), ASKS, RESULT, assistant("7"), user("and 3?")]
    assert turns(messages, "rollout") == [[user("a")], [RESULT], [user("and 3?")]]


def test_rollout_of_nested_turns_splits_between_them() -> None:
    nested = [[SYSTEM, user("a"), assistant("1")], [user("b")]]
    assert turns(nested, "rollout") == [[SYSTEM, user("a")], [user("b")]]
    assert turns(nested) == [[SYSTEM, user("a"), assistant("1"), user("b")]]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([assistant("a")], "nothing_to_answer"),
        ([SYSTEM, assistant("hello"), user("a")], "nothing_to_answer"),
        ([user(" "), assistant("b"), user("c")], "empty_prompt"),
    ],
)
def test_rollout_that_cannot_be_asked_is_a_reject(messages: list[Any], expected: str) -> None:
    assert reason({"messages": messages}, mode="rollout") == expected


def test_nested_question_with_bare_function_schemas() -> None:
    schema = {"name": "area", "description": "Area", "parameters": {"type": "dict", "properties": {}}}
    row = read(
        {"task_id": "simple_0", "question": [[user("Area of a triangle?")]], "function": [schema]},
        prompt="question",
        id="task_id",
        tools="function",
    )
    assert row.id == "simple_0"
    assert row.turns == [[user("Area of a triangle?")]]
    assert row.tools == [{"type": "function", "function": schema}]


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "function", "function": {"name": "wx"}}],
        [{"name": "wx"}],
        {"name": "wx"},
        '[{"name": "wx"}]',
        '{"type": "function", "function": {"name": "wx"}}',
    ],
)
def test_tools_come_out_in_one_form(value: Any) -> None:
    tools = read({"messages": [user("a")], "tools": value}).tools
    assert tools == [{"type": "function", "function": {"name": "wx"}}]


@pytest.mark.parametrize("value", [None, [], "", " ", "[]", "null"])
def test_tools_may_be_absent(value: Any) -> None:
    assert read({"messages": [user("a")], "tools": value}).tools is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("wx", "bad_json"), (["wx"], "bad_tools"), (5, "bad_tools"), ('["wx"]', "bad_tools")],
)
def test_tools_of_another_shape_are_a_reject(value: Any, expected: str) -> None:
    assert reason({"messages": [user("a")], "tools": value}) == expected


def test_tools_in_json_text_are_cleaned_of_lone_surrogates() -> None:
    tools = read({"messages": [user("a")], "tools": r'[{"name": "wx", "description": "\udc97"}]'}).tools
    assert tools == [{"type": "function", "function": {"name": "wx", "description": "\ufffd"}}]


def test_system_column_comes_first() -> None:
    row = read({"prompt": "a", "sys": "Be brief."}, "text", system="sys")
    assert row.turns == [[SYSTEM, user("a")]]
    assert read({"prompt": "a", "sys": None}, "text", system="sys").turns == [[user("a")]]
    rolled = read({"turns": ["a", "b"], "sys": "Be brief."}, "turns", system="sys")
    assert rolled.turns == [[SYSTEM, user("a")], [user("b")]]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"id": "007"}, "007"),
        ({"id": 0}, "0"),
        ({"id": None, "task_id": "t"}, "t"),
        ({"id": "", "uuid": "u"}, "u"),
        ({"id": 1.0}, "f.jsonl:3"),
        ({"id": [3]}, "f.jsonl:3"),
        ({}, "f.jsonl:3"),
    ],
)
def test_id_is_the_rows_own_or_its_place(data: dict[str, Any], expected: str) -> None:
    assert read({**data, "prompt": "a"}, "text").id == expected


def test_id_column_that_is_named_is_the_only_one() -> None:
    assert read({"id": "1", "key": "k", "prompt": "a"}, "text", id="key").id == "k"
    assert read({"id": "1", "prompt": "a"}, "text", id="key").id == "f.jsonl:3"
