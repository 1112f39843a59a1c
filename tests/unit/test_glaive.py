from __future__ import annotations

from typing import Any

import pytest
from helpers import user

from promptmill.errors import PromptRejected
from promptmill.prompts.formats import to_conversation
from promptmill.prompts.formats.row import Row
from promptmill.settings import ColumnSettings, PolicySettings
from promptmill.types import Conversation

END = "<|endoftext|>"


def read(chat: Any, system: Any = "SYSTEM: Help.", **more: Any) -> Conversation:
    row = Row({"system": system, "chat": chat, **more}, "f:1", ColumnSettings(), PolicySettings())
    return to_conversation(row, "glaive", None)


def reason(chat: Any, system: Any = "SYSTEM: Help.") -> str:
    with pytest.raises(PromptRejected) as caught:
        read(chat, system)
    return caught.value.reason


def chat(*turns: str) -> str:
    return "\n\n\n".join(turns) + "\n\n"


def arguments(call: str) -> list[str]:
    row = read(chat("USER: go", f"ASSISTANT: <functioncall> {call} {END}", "FUNCTION RESPONSE: 1"))
    return [c["function"]["arguments"] for c in row.turns[0][2]["tool_calls"]]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("""{"name": "f", "arguments": '{"a": "b"}'}""", '{"a": "b"}'),
        ("""{"name": "f", "arguments": '{"a": "it's 'so'"}'}""", """{"a": "it's 'so'"}"""),
        (r"""{"name": "f", "arguments": '{"a": "it\'s"}'}""", """{"a": "it's"}"""),
        (r"""{"name": "f", "arguments": '{"a": "\"q\"\n"}'}""", r"""{"a": "\"q\"\n"}"""),
        ("""{ "name" : "f" ,\n "arguments" : '{}' }""", "{}"),
        ("""{"name": "f", "arguments": {"a": 1}}""", '{"a":1}'),
        ("""{"name": "f", "arguments": "{\\"a\\": 1}"}""", '{"a": 1}'),
        ("""{"name": "f"}""", "{}"),
    ],
)
def test_arguments_are_the_json_that_stands_there(call: str, expected: str) -> None:
    assert arguments(call) == [expected]


@pytest.mark.parametrize(
    "call",
    [
        "",
        "f(1)",
        """{"name": "f", "arguments": 'a: b'}""",
        """{"name": "f", "arguments": '[1]'}""",
        """{"name": "f", "arguments": '{"a": "b'}""",
        """{"name": "f", "arguments": 5}""",
        """{"name": 5, "arguments": {}}""",
        """{"name": "f", "arguments": '{}'} and more""",
        """["name"]""",
    ],
)
def test_call_that_is_none_is_a_reject(call: str) -> None:
    assert (
        reason(chat("USER: go", f"ASSISTANT: <functioncall> {call} {END}", "USER: so?")) == "bad_tool_calls"
    )


def test_text_before_a_call_and_several_calls_in_one_turn_are_kept() -> None:
    one = """<functioncall> {"name": "f", "arguments": '{"n": 1}'}"""
    turn = f"ASSISTANT: I will look. {one} {END} {one.replace('1', '2')} {END}"
    row = read(chat("USER: go", turn, "FUNCTION RESPONSE: a", "FUNCTION RESPONSE: b"))
    said = row.turns[0][2]
    assert said["content"] == "I will look."
    assert [call["id"] for call in said["tool_calls"]] == ["functions.f:0", "functions.f:1"]
    assert [m["tool_call_id"] for m in row.turns[0][3:]] == ["functions.f:0", "functions.f:1"]


def test_roles_inside_text_are_text() -> None:
    said = "The log says\nUSER: root\n\nand ASSISTANT: none; FUNCTION RESPONSE: x"
    assert read(chat(f"USER: {said}", f"ASSISTANT: Yes. {END}")).turns[0][1] == user(said)


def test_role_on_the_line_of_an_end_is_a_turn() -> None:
    line = f"""ASSISTANT: {END} ASSISTANT: <functioncall> {{"name": "f", "arguments": '{{}}'}} {END}"""
    row = read(chat("USER: go", line, "FUNCTION RESPONSE: 1"))
    assert [message["role"] for message in row.turns[0]] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("transcript", "expected"),
    [
        ("", "nothing_to_answer"),
        ("hello", "bad_transcript"),
        (None, "not_text"),
        (["USER: a"], "not_text"),
        (chat("BOT: x", "USER: a"), "bad_transcript"),
        (chat("USER: a", "FUNCTION RESPONSE: 1"), "bad_transcript"),
        (chat("USER: a <functioncall> b"), "bad_transcript"),
        (chat(f"USER: a {END} b"), "bad_transcript"),
        (chat("USER: a", f"ASSISTANT: b {END} c", "USER: d"), "bad_transcript"),
        (chat("USER: "), "empty_prompt"),
        (chat(f"ASSISTANT: Hi. {END}"), "nothing_to_answer"),
    ],
)
def test_transcript_that_does_not_come_apart_is_a_reject(transcript: Any, expected: str) -> None:
    assert reason(transcript) == expected


@pytest.mark.parametrize("between", ["", " ", ",\n", "\n\n", "\n"])
def test_functions_glued_together_come_apart(between: str) -> None:
    one, two = '{"name": "a", "parameters": {"x": "{"}}', '{"name": "b", "parameters": null}'
    row = read(chat("USER: go"), f"SYSTEM: Use these -\n{one}{between}{two}\n\nBe brief.")
    assert row.tools is not None
    assert [tool["function"]["name"] for tool in row.tools] == ["a", "b"]
    prose = row.turns[0][0]["content"]
    assert prose.startswith("Use these -")
    assert prose.endswith("Be brief.")
    assert "{" not in prose


def test_braces_in_prose_are_prose() -> None:
    text = 'Answer as {json}, e.g.\n{"answer": 1}\nand nothing else.'
    row = read(chat("USER: go"), f"SYSTEM: {text}")
    assert row.turns[0][0]["content"] == text
    assert row.tools is None


@pytest.mark.parametrize("system", ['SYSTEM: Use\n{"name": "a", }', "SYSTEM: Use\n{" + '"a":[' * 2000])
def test_function_that_is_no_json_is_a_reject(system: str) -> None:
    assert reason(chat("USER: go"), system) == "bad_tools"


@pytest.mark.parametrize("system", [None, "", "SYSTEM: ", "  "])
def test_system_may_be_empty(system: Any) -> None:
    assert read(chat("USER: go"), system).turns == [[user("go")]]


def test_lone_surrogates_in_a_function_are_replaced() -> None:
    row = read(chat("USER: go"), r"SYSTEM: Use" + "\n" + r'{"name": "a", "description": "\ud83d"}')
    assert row.tools == [{"type": "function", "function": {"name": "a", "description": "\ufffd"}}]
