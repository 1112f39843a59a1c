"""Reasoning of the model families: templates that behave as theirs do, tokenizers with their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from helpers import byte_tokenizer, user

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.markers import find
from promptmill.release.quality import judge
from promptmill.settings import ChatSettings
from promptmill.splitting import Split
from promptmill.types import Completion

_KIMI = (
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
)
_KIMI_ASKS = "<|im_assistant|>assistant<|im_middle|>"
_KIMI_SPECIAL = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "[BOS]")
_KIMI_PLAIN = (
    "<think>",
    "</think>",
    *(
        f"<|tool_call{end}|>"
        for end in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
    ),
    "<|reserved_token_163700|>",
)
_IM = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
_IM_ASKS = "<|im_start|>assistant\n"
_IM_SPECIAL = ("<|im_start|>", "<|im_end|>")
_ENDS = ("<think>", "</think>")


@dataclass(frozen=True)
class Model:
    """What the table says of a family: sglang's and the vendors' templates, cut to what matters here."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...]
    end: str
    family: str
    opens: str
    """What the answer has to begin with for reasoning: nothing where the template opened it."""
    closes: str = "</think>"
    off: dict[str, Any] = field(default_factory=dict)
    """Arguments that switch reasoning off."""
    on: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "Kimi-K2-Thinking": Model(
        _KIMI + _KIMI_ASKS, _KIMI_SPECIAL, _KIMI_PLAIN, "<|im_end|>", "kimi_k2", "<think>"
    ),
    "Kimi-K2.5": Model(
        _KIMI + _KIMI_ASKS + "<think>{% if thinking is defined and not thinking %}</think>{% endif %}",
        _KIMI_SPECIAL,
        _KIMI_PLAIN,
        "<|im_end|>",
        "kimi_k2",
        "",
        off={"thinking": False},
    ),
    "DeepSeek-R1": Model(
        "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜><think>\n",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (*_ENDS, "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "think",
        "",
    ),
    "DeepSeek-V3.1": Model(
        "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜>"
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (*_ENDS, "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        "think",
        "",
        off={"thinking": False},
        on={"thinking": True},
    ),
    "Qwen3": Model(
        _IM
        + _IM_ASKS
        + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
        _IM_SPECIAL,
        _ENDS,
        "<|im_end|>",
        "think",
        "<think>\n",
        off={"enable_thinking": False},
    ),
    "Qwen3-Thinking": Model(_IM + _IM_ASKS + "<think>\n", _IM_SPECIAL, _ENDS, "<|im_end|>", "think", ""),
    "GLM-4.5": Model(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{{ '/nothink' if enable_thinking is defined and not enable_thinking }}{% endfor %}<|assistant|>"
        "{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        _ENDS,
        "<|user|>",
        "think",
        "\n<think>",
        off={"enable_thinking": False},
    ),
    "GLM-4.7": Model(
        "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
        "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}",
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|endoftext|>"),
        _ENDS,
        "<|user|>",
        "think",
        "",
        off={"enable_thinking": False},
    ),
    "MiniMax-M2": Model(
        "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endfor %}]~b]ai\n<think>\n",
        ("]~b]", "[e~["),
        _ENDS,
        "[e~[",
        "think",
        "",
    ),
    "MiniMax-M3": Model(
        "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content }}[e~[\n{% endfor %}]~b]ai\n"
        "{{ '<mm:think></mm:think>' if thinking_mode == 'off' }}",
        ("]~b]", "[e~["),
        ("<mm:think>", "</mm:think>", "<think>", "</think>"),
        "[e~[",
        "minimax_m3",
        "<mm:think>",
        closes="</mm:think>",
        off={"thinking_mode": "off"},
    ),
    "gpt-oss": Model(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "<|start|>assistant",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
        (),
        "<|return|>",
        "gpt_oss",
        "<|channel|>analysis<|message|>",
        closes="<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
THAT_CAN_BE_SWITCHED_OFF = [name for name, model in FAMILIES.items() if model.off]


class Answering:
    """One model, asked and answering in text."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.model = model = FAMILIES[name]
        ends = {"eos_token": model.end, "bos_token": model.special[0]}
        self.tokenizer = byte_tokenizer(model.template, model.special, model.plain, **ends)
        self.renderer = ChatRenderer(self.tokenizer, ChatSettings(**settings))
        self.prompt = self.renderer.render([user("What is 3+4?")], None)

    def __call__(self, text: str) -> Split:
        return self.renderer.split(self.prompt, self.tokenizer(text)["input_ids"])

    def tail(self, n: int) -> str:
        return self.renderer.decode_all(self.prompt[-n:])


def asked(name: str, **settings: Any) -> Answering:
    return Answering(name, **{"template_kwargs": FAMILIES[name].on, **settings})


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_of_each_family_is_split_without_a_setting(name: str) -> None:
    model, answer = FAMILIES[name], asked(name)
    assert answer.renderer.markers.family == model.family
    split = answer(f"{model.opens}Add the two.{model.closes}\n\n7{model.end}")
    assert (split.reasoning, split.content, split.flags) == ("Add the two.", "7", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_of_each_family_that_is_cut_has_no_content(name: str) -> None:
    model, answer = FAMILIES[name], asked(name)
    split = answer(f"{model.opens}Add the two, then")
    assert (split.reasoning, split.content) == ("Add the two, then", "")
    assert split.flags == ["reasoning_never_closed"]


@pytest.mark.parametrize("name", THAT_CAN_BE_SWITCHED_OFF)
@pytest.mark.parametrize("open_reasoning", [False, True])
def test_reasoning_that_the_template_switches_off_is_not_looked_for(name: str, open_reasoning: bool) -> None:
    model = FAMILIES[name]
    answer = asked(name, template_kwargs=model.off, open_reasoning=open_reasoning)
    assert answer.prompt == asked(name, template_kwargs=model.off).prompt
    split = answer(f"7{model.end}")
    assert (split.reasoning, split.content, split.flags) == ("", "7", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_opening_marker_is_appended_where_asked_and_where_the_template_has_not_opened(name: str) -> None:
    model, plain, opened = FAMILIES[name], asked(name), asked(name, open_reasoning=True)
    marker = list(plain.renderer.markers.open)
    if model.opens:
        assert opened.prompt == [*plain.prompt, *marker]
        assert opened.renderer.fingerprint() != plain.renderer.fingerprint()
    else:
        assert opened.prompt == plain.prompt
    split = opened(f"Add.{model.closes}7{model.end}")
    assert (split.reasoning, split.content, split.flags) == ("Add.", "7", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_model_that_repeats_the_marker_is_split_all_the_same(name: str) -> None:
    model, opened = FAMILIES[name], asked(name, open_reasoning=True)
    marker = opened.renderer.decode_all(opened.renderer.markers.open)
    split = opened(f"{marker}Add.{model.closes}7{model.end}")
    assert (split.reasoning, split.content, split.flags) == ("Add.", "7", [])


def test_plain_model_has_no_reasoning_and_needs_no_setting() -> None:
    renderer = ChatRenderer(
        byte_tokenizer(_IM + _IM_ASKS, _IM_SPECIAL, eos_token="<|im_end|>"), ChatSettings()
    )
    prompt = renderer.render([user("hi")], None)
    ids = renderer._tokenizer("The tag </think> ends it.<|im_end|>")["input_ids"]
    assert renderer.split(prompt, ids) == Split("", "The tag </think> ends it.", 0, [])


@pytest.mark.parametrize("settings", [{"reasoning": "none"}, {"reasoning_open": ""}, {"reasoning_close": ""}])
def test_reasoning_can_be_switched_off_by_setting(settings: dict[str, Any]) -> None:
    answer = asked("DeepSeek-R1", **settings)
    assert not answer.renderer.markers
    assert answer("Add.7").content == "Add.7"


def test_markers_can_be_set_in_place_of_the_familys() -> None:
    tokenizer = byte_tokenizer(
        _IM + _IM_ASKS + "<seed:think>", _IM_SPECIAL, ("<seed:think>", "</seed:think>")
    )
    chat = ChatSettings(reasoning_open="<seed:think>", reasoning_close="</seed:think>")
    renderer = ChatRenderer(tokenizer, chat)
    split = renderer.split(renderer.render([user("hi")], None), tokenizer("a</seed:think>b")["input_ids"])
    assert (split.reasoning, split.content) == ("a", "b")


def test_marker_quoted_as_text_is_no_marker() -> None:
    answer = asked("Kimi-K2.5")
    spelt = [i for letter in "</think>" for i in answer.tokenizer(letter)["input_ids"]]
    (close,) = answer.renderer.markers.close
    text = answer.tokenizer("a tag ")["input_ids"]
    split = answer.renderer.split(answer.prompt, [*text, *spelt, close, *text, *spelt])
    assert (split.reasoning, split.content, split.flags) == ("a tag </think>", "a tag </think>", [])


def test_kimi_leaves_reasoning_for_a_tool_call() -> None:
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>"
        '{"p": "/"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    answer = asked("Kimi-K2.5")
    split = answer(f"I should look.{call}<|im_end|>")
    assert (split.reasoning, split.content, split.flags) == ("I should look.", call, ["left_for_tool_call"])
    closed = answer(f"I should look.</think>{call}<|im_end|>")
    assert (closed.reasoning, closed.content, closed.flags) == ("I should look.", call, [])


def test_gpt_oss_calls_keep_their_form_and_answers_lose_their_header() -> None:
    answer = asked("gpt-oss")
    call = '<|channel|>commentary to=functions.ls <|constrain|>json<|message|>{"p": "/"}'
    split = answer(f"<|channel|>analysis<|message|>Look.<|end|><|start|>assistant{call}<|call|>")
    assert (split.reasoning, split.content, split.flags) == ("Look.", f"{call}<|call|>", [])
    at_once = answer("<|channel|>final<|message|>7<|return|>")
    assert (at_once.reasoning, at_once.content, at_once.flags) == ("", "7", [])
    cut = answer("<|channel|>analysis<|message|>Look.<|end|><|start|>assis")
    assert (cut.reasoning, cut.content, cut.flags) == ("Look.", "", [])


def test_gpt_oss_gets_earlier_reasoning_under_the_name_that_it_reads() -> None:
    template = "{% for m in messages %}[{{ m.thinking }}]{{ m.content }}{% endfor %}"
    tokenizer = byte_tokenizer(template, FAMILIES["gpt-oss"].special)
    earlier = {"role": "assistant", "content": "7", "reasoning_content": "Add."}
    assert ChatRenderer(tokenizer, ChatSettings()).render_text([user("a"), earlier], None) == "[]a[Add.]7"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("a</think>b</think>c", ["several_closes", "control_tokens"]),
        ("a</think>fine<|im_end|><|im_user|>next question", ["control_tokens"]),
        ("a<|im_end|>b</think>c<|im_end|>", ["control_tokens"]),
        ("a</think>abc <|reserved_token_163700|> def", ["control_tokens"]),
        ("a</think>b <think> c", ["control_tokens"]),
        ("a</think>fine<|im_end|>", []),
        ('</think>```json\n{"name": "ls", "arguments": {}}\n```', []),
    ],
)
def test_control_tokens_in_an_answer_are_flagged(text: str, flags: list[str]) -> None:
    assert asked("Kimi-K2.5")(text).flags == flags


def test_cut_character_is_told_from_one_that_the_model_wrote() -> None:
    answer = asked("Kimi-K2.5")
    fox = answer.tokenizer("done 🦊")["input_ids"]
    close = answer.renderer.markers.close
    cut = answer.renderer.split(answer.prompt, [*close, *fox[:-1]])
    assert (cut.content, cut.flags) == ("done \ufffd", ["cut_character"])
    assert answer("a</think>the symbol \ufffd is U+FFFD").flags == []


class WrongClass:
    """A tokenizer that knows a token, and splits its text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [i for letter in text for i in self._tokenizer(letter)["input_ids"]]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_tokenizer_that_splits_a_marker_it_knows_is_refused() -> None:
    tokenizer = WrongClass(asked("Kimi-K2.5").tokenizer)
    with pytest.raises(ConfigError, match=r"'<think>' is the token \d+, .* WrongClass of transformers \d"):
        ChatRenderer(tokenizer, ChatSettings())


def test_ids_of_the_markers_can_be_demanded() -> None:
    markers = asked("Kimi-K2.5").renderer.markers
    assert asked("Kimi-K2.5", reasoning_ids=[*markers.open, *markers.close]).renderer.markers == markers
    for name, settings in {
        "Kimi-K2.5": {},
        "gpt-oss": {},
        "Qwen3": {"reasoning": "none"},
    }.items():
        with pytest.raises(ConfigError, match=r"chat\.reasoning_ids"):
            asked(name, reasoning_ids=[163606, 163607], **settings)


@pytest.mark.parametrize(
    ("wanted", "start", "at"), [((2, 3), 0, 1), ((2, 3), 2, 4), ((3, 2), 0, 2), ((9,), 0, None)]
)
def test_find_is_the_first_place_of_all_of_it(wanted: tuple[int, ...], start: int, at: int | None) -> None:
    assert find([1, 2, 3, 2, 2, 3], wanted, start) == at


WORDLESS = ("<|im_end|>", "  \n<|im_end|>", "</think>  \n<|im_end|>", "thought</think><|im_end|>")


@pytest.mark.parametrize("text", WORDLESS)
def test_answer_without_a_word_is_empty(text: str) -> None:
    off = asked("Kimi-K2.5", template_kwargs={"thinking": False})
    answer = off if "</think>" not in text else asked("Kimi-K2.5")
    ids = answer.tokenizer(text)["input_ids"]
    status, flags = judge(Completion(ids, "stop", 3), answer(text), 100)
    assert (status, flags) == ("empty", [])


def test_answer_that_is_cut_inside_its_reasoning_is_truncated_and_keeps_it() -> None:
    answer = asked("Kimi-K2.5")
    text = "Let me think about it and"
    split = answer(text)
    ids = answer.tokenizer(text)["input_ids"]
    assert judge(Completion(ids, "length", 40), split, len(ids)) == ("truncated", ["reasoning_never_closed"])
    assert (split.reasoning, split.content) == (text, "")
