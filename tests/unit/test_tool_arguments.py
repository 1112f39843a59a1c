"""Templates that want the arguments of tool calls as a mapping, as text, or either."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import byte_tokenizer, make_answer, make_preparation, user, write_lines

from promptmill.chat import ChatRenderer
from promptmill.errors import PromptRejected
from promptmill.prompts.manifest import prepare, read_prompts
from promptmill.release.views import Asked, rows_of
from promptmill.settings import ChatSettings
from promptmill.tool_arguments import form_of, with_arguments

_CALLS = (
    "{{% for m in messages %}}<{{{{ m.role }}}}>{{% for c in m.tool_calls or [] %}}{0}{{% endfor %}}"
    "{{{{ m.content or '' }}}}{{% endfor %}}{{{{ tools and '!' }}}}"
)
# As GLM and Qwen3-Coder do, Qwen2.5 and gpt-oss, nobody, DeepSeek, some, and Kimi.
ITEMS = _CALLS.format("{% for k, v in c.function.arguments|items %}<p {{ k }}>{{ v }}</p>{% endfor %}")
TOJSON = _CALLS.format("{{ c.function.arguments | tojson }}")
LETTERS = _CALLS.format(
    "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }};{% endfor %}"
)
JOINED = _CALLS.format("{{ '```json\n' + c.function.arguments + '\n```' }}")
PRINTED = _CALLS.format("{{ c.function.arguments }}")
EITHER = _CALLS.format(
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
)
SILENT = _CALLS.format("")
GIVEN = '{"a": 2, "b":  5}'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def renderer_of(template: str, **settings: Any) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(template), ChatSettings(**settings))


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "t0", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        user("add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t0", "content": "7"},
        user("double it"),
    ]


def rendered(template: str, arguments: Any, **settings: Any) -> str:
    text = renderer_of(template, **settings).render_text(calling(arguments), TOOLS)
    return text.removeprefix("<user>add<assistant>").removesuffix("<tool>7<user>double it!")


def refusal(template: str, arguments: Any, **settings: Any) -> tuple[str, str]:
    with pytest.raises(PromptRejected) as caught:
        rendered(template, arguments, **settings)
    return caught.value.reason, caught.value.detail


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (ITEMS, "<p a>2</p><p b>5</p>"),
        (TOJSON, '{"a": 2, "b": 5}'),
        (LETTERS, "a=2;b=5;"),
        (JOINED, f"```json\n{GIVEN}\n```"),
        (PRINTED, GIVEN),
        (EITHER, GIVEN),
        (SILENT, ""),
    ],
)
def test_arguments_in_json_text_are_rendered_as_the_template_wants(template: str, shown: str) -> None:
    assert rendered(template, GIVEN) == shown


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (ITEMS, "<p a>2</p>"),
        (TOJSON, '{"a": 2}'),
        (JOINED, '```json\n{"a": 2}\n```'),
        (PRINTED, '{"a": 2}'),
        (EITHER, '{"a": 2}'),
    ],
)
def test_arguments_that_are_a_mapping_are_rendered_as_the_template_wants(template: str, shown: str) -> None:
    assert rendered(template, {"a": 2}) == shown


@pytest.mark.parametrize("broken", ['{"a": 2', "2", "[1]", "add(2)", "{'a': 2}", "[" * 9999])
def test_arguments_that_are_no_mapping_reject_the_row_where_one_is_wanted(broken: str) -> None:
    for template in (ITEMS, TOJSON):
        reason, detail = refusal(template, broken)
        assert reason == "bad_tool_arguments"
        assert "the arguments of add" in detail
    assert rendered(JOINED, broken) == f"```json\n{broken}\n```"


@pytest.mark.parametrize("nothing", ["", " ", "{}"])
def test_no_arguments_are_an_empty_mapping(nothing: str) -> None:
    assert rendered(ITEMS, nothing) == ""
    assert rendered(TOJSON, nothing) == "{}"


def test_form_can_be_set() -> None:
    assert rendered(EITHER, GIVEN, tool_arguments="mapping") == '{"a": 2, "b": 5}'
    assert rendered(TOJSON, GIVEN, tool_arguments="text") == json.dumps(GIVEN)


def test_template_that_takes_no_call_of_the_probe_is_tried_with_each_row() -> None:
    picky = "{% if messages[0].content != 'add' %}{{ raise_exception('no') }}{% endif %}" + ITEMS
    assert rendered(picky, GIVEN) == "<p a>2</p><p b>5</p>"
    assert refusal("{{ raise_exception('never') }}", GIVEN) == ("template_error", "never")


def test_calls_are_copied_where_they_are_changed() -> None:
    messages = calling(GIVEN)
    before = json.dumps(messages)
    changed = with_arguments(messages, "mapping")
    assert changed[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 5}
    assert json.dumps(messages) == before
    assert with_arguments(messages, "as_given") is messages
    assert with_arguments([user("a")], "mapping") == [user("a")]
    flat = [{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": "{}"}, {}]}]
    assert with_arguments(flat, "mapping")[0]["tool_calls"] == [{"name": "add", "arguments": {}}, {}]


def test_form_is_asked_of_a_whole_conversation() -> None:
    seen: list[list[str]] = []

    def render(messages: list[Any]) -> str:
        seen.append([message["role"] for message in messages])
        return str(messages)

    assert form_of(render) == "text"
    assert seen == [["user", "assistant", "tool"]] * 2


def test_arguments_stay_in_the_release_as_they_came(tmp_path: Path) -> None:
    row = {"id": "k1", "messages": calling(GIVEN), "tools": TOOLS}
    source = write_lines(tmp_path / "a.jsonl", [row])
    manifest = prepare(make_preparation(source, renderer_of(ITEMS)))
    (prompt,) = read_prompts(manifest)
    asked = Asked("A", "last_turn", "f00", lambda *_: None)
    (published,) = rows_of(
        "conversations", asked, prompt, {h: make_answer(h) for (h,) in prompt.prompt_hashes}
    )
    (call,) = published["conversations"][1]["tool_calls"]
    assert call["function"]["arguments"] == GIVEN
