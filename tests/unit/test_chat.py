from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import DEMO_TEMPLATE, byte_tokenizer, make_answer, user

from promptmill.chat import ChatRenderer, as_message
from promptmill.errors import ConfigError, PromptRejected
from promptmill.settings import ChatSettings

RendererOf = Callable[[str], ChatRenderer]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
TAKE_TURNS = (
    "{% for m in messages %}{% if (m.role=='user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles have to take turns') }}{% endif %}<{{m.role}}>{{m.content}}{% endfor %}"
)
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


class Splitter:
    """Splits texts, given and taken as text."""

    def __init__(self, tokenizer: Any, renderer: ChatRenderer) -> None:
        self.tokenizer, self.renderer = tokenizer, renderer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def __call__(self, prompt: str, *output: str) -> tuple[str, str, list[str]]:
        """`output` in pieces that are tokenized apart, as a model may generate them."""
        split = self.renderer.split(self.ids(prompt), [i for text in output for i in self.ids(text)])
        return split.reasoning, split.content, split.flags


@pytest.fixture
def split(tokenizer: Any, renderer: ChatRenderer) -> Splitter:
    return Splitter(tokenizer, renderer)


def reason(renderer: ChatRenderer, messages: list[Any], tools: Any = None) -> tuple[str, str]:
    with pytest.raises(PromptRejected) as caught:
        renderer.render(messages, tools)
    return caught.value.reason, caught.value.detail


def test_tokenizer_rebuilt_from_gguf_gives_the_models_ids(tokenizer: Any) -> None:
    text = "Hi 42  föx 🦊\n<think>"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:4] == ["Hi", "Ġ", "4", "2"]
    assert tokenizer("<|im_start|>user<|im_end|>")["input_ids"] == [1, 4093, 2]
    assert len(tokenizer) == 49152


def test_render_gives_the_ids_of_the_rendered_text(tokenizer: Any, renderer: ChatRenderer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("hi")]
    text = renderer.render_text(messages, None)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )
    assert renderer.render(messages, None) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_render_shows_tools_and_their_calls(renderer: ChatRenderer) -> None:
    call = {"id": "t0", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    messages = [
        user("add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t0", "content": "7"},
    ]
    text = renderer.decode(renderer.render(messages, TOOLS))
    assert '{"name": "add", "parameters": {"type": "object"}}' in text
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text
    assert "tool\n7" in text


def test_render_with_the_models_own_template_and_its_arguments(tokenizer: Any, tmp_path: Path) -> None:
    own = ChatRenderer(tokenizer, ChatSettings())
    assert "<|im_start|>assistant\n" in own.render_text([user("hi")], None)
    (tmp_path / "t.jinja").write_text("{{ 'deep' if thinking else 'quick' }}")
    settings = ChatSettings(template=str(tmp_path / "t.jinja"), template_kwargs={"thinking": True})
    assert ChatRenderer(tokenizer, settings).render_text([user("hi")], None) == "deep"


def test_template_that_raises_rejects_with_its_words(renderer_of: RendererOf) -> None:
    renderer = renderer_of(TAKE_TURNS)
    assert reason(renderer, [user("one"), user("two")]) == ("template_error", "roles have to take turns")
    starts = [{"role": "assistant", "content": "I start"}, user("ok")]
    assert reason(renderer, starts) == ("template_error", "roles have to take turns")
    assert renderer.decode(renderer.render([user("one")], None)) == "<user>one"


@pytest.mark.parametrize(
    "template",
    [
        "{% for k, v in messages[0].content|items %}{% endfor %}",
        "{{ messages[0].nothing.at_all }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | no_such_filter }}",
    ],
)
def test_template_that_fails_on_a_row_rejects_it(renderer_of: RendererOf, template: str) -> None:
    assert reason(renderer_of(template), [user("one")])[0] == "template_error"


def test_template_that_ignores_tools_rejects_a_prompt_with_tools(renderer_of: RendererOf) -> None:
    renderer = renderer_of(PLAIN)
    assert reason(renderer, [user("hi")], TOOLS)[0] == "tools_not_rendered"
    assert renderer.decode(renderer.render([user("hi")], None)) == "<|user|>hi"


def test_template_that_is_missing_is_a_configuration_error(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"chat\.template '.*none\.jinja': cannot be read"):
        ChatRenderer(tokenizer, ChatSettings(template=str(tmp_path / "none.jinja")))


def test_template_that_renders_nothing_rejects(renderer_of: RendererOf) -> None:
    renderer = renderer_of("{% if messages[0].content == 'say' %}said{% endif %}")
    said, nothing = renderer.render_many([([user("say")], None), ([user("nothing")], None)])
    assert list(said) == renderer.render([user("say")], None)
    assert isinstance(nothing, PromptRejected)
    assert "to nothing" in nothing.detail
    with pytest.raises(PromptRejected, match="to nothing"):
        renderer.render([user("nothing")], None)


@pytest.mark.parametrize("name", ["tokenize", "truncation", "return_tensors", "messages", "chat_template"])
def test_arguments_of_rendering_are_none_of_the_templates(tokenizer: Any, name: str) -> None:
    chat = ChatSettings(template=str(DEMO_TEMPLATE), template_kwargs={name: True})
    with pytest.raises(ConfigError, match=f"chat.template_kwargs: {name}: "):
        ChatRenderer(tokenizer, chat)


def test_model_without_a_template_needs_one(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match=r"name one in chat\.template"):
        ChatRenderer(tokenizer, ChatSettings())


def test_marker_that_does_not_survive_the_tokenizer_is_refused(tokenizer: Any) -> None:
    class Lossy:
        chat_template = "x"

        def __call__(self, text: str, **_: Any) -> Any:
            return tokenizer(text, add_special_tokens=False)

        def decode(self, ids: list[int], **_: Any) -> str:
            return str(tokenizer.decode(ids)).strip("<>")

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    with pytest.raises(ConfigError, match=r"the reasoning marker '<think>' comes back .* as 'think'"):
        ChatRenderer(Lossy(), ChatSettings(reasoning="think"))


def test_split_of_an_answer_whose_prompt_opens_reasoning(split: Splitter) -> None:
    assert split("assistant\n<think>\n", "Add the two.", "</think>", "\n\n7") == ("Add the two.", "7", [])
    assert split("assistant\n<think>", "Add.", "</think>", "7<|im_end|>") == ("Add.", "7", [])


def test_split_counts_reasoning_with_its_closing_marker(split: Splitter) -> None:
    output = [*split.ids("Add."), *split.renderer.markers.close, *split.ids("\n\n7")]
    result = split.renderer.split(split.ids("<think>"), output)
    assert result.reasoning_tokens == len(split.ids("Add.")) + len(split.renderer.markers.close)
    assert split.renderer.split(split.ids("<think>"), split.ids("Add.")).reasoning_tokens == 2


def test_split_of_reasoning_that_never_closes(split: Splitter) -> None:
    expected = ("Add the two, then", "", ["reasoning_never_closed"])
    assert split("assistant\n<think>\n", "Add the two, then") == expected
    assert split("assistant\n", "<think>", "Add the two, then") == expected
    assert split("<think>") == ("", "", ["reasoning_never_closed"])


def test_split_of_an_answer_that_opens_reasoning_itself(split: Splitter) -> None:
    assert split("assistant\n", "<think>", "\nAdd.", "</think>", "7") == ("Add.", "7", [])


def test_split_of_an_answer_that_repeats_the_opening_marker(split: Splitter) -> None:
    assert split("assistant\n<think>", "<think>", "Add.", "</think>", "7") == ("Add.", "7", [])


def test_split_is_at_the_first_of_two_closing_markers(split: Splitter) -> None:
    assert split("<think>", "a", "</think>", "b", "</think>", "c") == (
        "a",
        "b</think>c",
        ["several_closes"],
    )


def test_split_of_an_answer_without_reasoning(split: Splitter) -> None:
    assert split("assistant\n", " 7\n") == ("", "7", [])
    assert split("assistant\n", "the tag ", "</think>", " ends it") == ("", "the tag </think> ends it", [])
    assert split("assistant\n", "first ", "<think>", "x") == ("", "first <think>x", [])


@pytest.mark.parametrize("prompt", ["<think>\n\n</think>\n\n", "<think> plan", "<think>\n<|im_end|>", ""])
def test_split_knows_a_prompt_that_does_not_end_inside_reasoning(split: Splitter, prompt: str) -> None:
    assert split(prompt, "7", "</think>", "8") == ("", "7</think>8", [])


def test_split_without_markers_is_all_content(tokenizer: Any) -> None:
    settings = ChatSettings(template=str(DEMO_TEMPLATE), reasoning_open="", reasoning_close="")
    split = Splitter(tokenizer, ChatRenderer(tokenizer, settings))
    assert split("<think>", "a", "</think>", "b") == ("", "a</think>b", [])


def test_fingerprint_follows_the_template_and_its_arguments(tokenizer: Any, renderer_of: RendererOf) -> None:
    settings = ChatSettings(template=str(DEMO_TEMPLATE))
    again = ChatRenderer(tokenizer, settings).fingerprint()
    thinking = settings.model_copy(update={"template_kwargs": {"thinking": False}})
    assert ChatRenderer(tokenizer, settings).fingerprint() == again
    others = {ChatRenderer(tokenizer, thinking).fingerprint(), renderer_of(PLAIN).fingerprint()}
    assert len({again, *others}) == 3


def test_answer_as_history_carries_reasoning_where_there_is_some() -> None:
    assert as_message(make_answer(content="4", reasoning="2 and 2")) == {
        "role": "assistant",
        "content": "4",
        "reasoning_content": "2 and 2",
    }
    assert as_message(make_answer(content="4", reasoning="")) == {"role": "assistant", "content": "4"}


def test_template_that_ignores_tools_is_taken_where_the_profile_says_so() -> None:
    renderer = ChatRenderer(byte_tokenizer(PLAIN), ChatSettings(ignored_tools="keep"))
    assert renderer.decode(renderer.render([user("hi")], TOOLS)) == "<|user|>hi"


def test_template_is_looked_at_once_for_tools_and_the_roles_around(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if tools and messages[-1].role == 'user' %}{{ tools }}{% endif %}" + PLAIN
    renderer = ChatRenderer(byte_tokenizer(template), ChatSettings())
    rendered: list[Any] = []
    apply = renderer._tokenizer.apply_chat_template

    def counted(messages: Any, tools: Any, **more: Any) -> Any:
        rendered.append(tools)
        return apply(messages, tools=tools, **more)

    monkeypatch.setattr(renderer._tokenizer, "apply_chat_template", counted)
    for text in ("a", "b", "c"):
        renderer.render([user(text)], TOOLS)
    assert rendered == [TOOLS, None, TOOLS, TOOLS]
    ends_with_result = [user("a"), {"role": "tool", "content": "7"}]
    for _ in range(2):  # and what is rejected, each time
        assert reason(renderer, ends_with_result, TOOLS)[0] == "tools_not_rendered"


def test_tools_that_no_fast_json_takes_are_looked_at_all_the_same() -> None:
    tools = [{"type": "function", "function": {"name": "f", "maximum": 2**70}}]
    assert reason(ChatRenderer(byte_tokenizer(PLAIN), ChatSettings()), [user("a")], tools)[0] == (
        "tools_not_rendered"
    )
    shown = ChatRenderer(byte_tokenizer("{{ tools }}"), ChatSettings())
    assert str(2**70) in shown.decode(shown.render([user("a")], tools))


def test_prompt_begins_with_one_beginning_at_most() -> None:
    tokenizer = byte_tokenizer("<s><s>{{ messages[0].content }}<s><s>", ("<s>",), bos_token="<s>")
    renderer = ChatRenderer(tokenizer, ChatSettings())
    assert renderer.decode_all(renderer.render([user("a")], None)) == "<s>a<s><s>"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }};{% endfor %}", "all"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "none"),
        (
            "{% for m in messages %}{{ m.reasoning_content if not loop.first }}{{ m.content }};{% endfor %}",
            "some",
        ),
    ],
)
def test_prompt_tells_how_much_earlier_reasoning_it_shows(template: str, shown: str) -> None:
    renderer = ChatRenderer(byte_tokenizer(template), ChatSettings())
    messages = [
        {"role": "assistant", "content": "12", "reasoning_content": "three fours"},
        {"role": "assistant", "content": "It is 13.", "reasoning_content": "13\n"},
        user("plus 1?"),
    ]
    assert renderer.shows_reasoning(messages, renderer.render(messages, None)) == shown
    bare = [user("plus 1?")]
    assert renderer.shows_reasoning(bare, renderer.render(bare, None)) is None


def test_vocabulary_may_have_holes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = tokenizer.get_vocab() | {"<|far|>": 70_000}
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: vocabulary)
    assert ChatRenderer(tokenizer, ChatSettings(template=str(DEMO_TEMPLATE))).vocabulary == 70_001
