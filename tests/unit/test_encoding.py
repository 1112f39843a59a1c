"""Many texts at a time give what the tokenizer's own class gives for each."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import DEMO_TEMPLATE, make_preparation, user, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from promptmill import encoding
from promptmill.chat import ChatRenderer
from promptmill.encoding import InPieces, make_encoder, split_words
from promptmill.errors import PromptRejected
from promptmill.prompts import rows as rows_
from promptmill.prompts.manifest import prepare, read_prompts, read_rejects
from promptmill.settings import ChatSettings

TEXTS = ["", " ", "2 + 2?", "föxes 🦊\r\n\x00\t’", "<|im_end|> inside", "a\u0301 ﬁ", "x" * 3000, "東京 12345"]
PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "<|endoftext|>",
    "system\n",
    " ",
    "\n\n",
    "the 12",
    "é🦊",
    "<",
    "  x",
]
CHARACTERS = [
    *" \n\r\t'\"a.1,/s+-é京\u0301\u00a0\u3000\x85\x1c\x00\u200b",
    "  ",
    " 's",
    "\r\n",
    "'LL",
    " a",
    "1234",
    "Ab",
]
QWEN = next(p for (p, *_) in encoding._APART if r"|\p{N}|" in p)
TOOL, HIDDEN = (
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "hidden")
)
ROWS: list[Any] = [
    {"messages": [user("Hello")]},
    "{not json",
    {"messages": [{"role": "pirate", "content": "arr"}]},
    {"messages": [user("fail, please")]},
    {"messages": [user("Add 1 and 2")], "tools": [TOOL]},
    {"messages": [user("Add 1 and 2")], "tools": [HIDDEN]},
    {"messages": [user("long " * 200)]},
    {"messages": [user("Hello")], "id": "again"},
    {"messages": [{"role": "system", "content": "Be brief."}, user("föxes 🦊 <|im_end|>")]},
]
TEMPLATE = """{%- for m in messages -%}
{%- if m.content.startswith("fail") %}{{ raise_exception("not this one") }}{% endif -%}
{%- if tools and tools[0].function.name != "hidden" %}{{ tools | tojson }}{% endif -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>"""


class OneByOne(ChatRenderer):
    """Renders through the tokenizer's own class, row by row."""

    def __init__(self, tokenizer: Any, settings: ChatSettings) -> None:
        super().__init__(tokenizer, settings)
        self._encode = None


def test_encoder_gives_the_ids_of_apply_chat_template(tokenizer: Any, renderer: ChatRenderer) -> None:
    rendered = renderer.render_many([([user(text)], None) for text in TEXTS])
    for text, ids in zip(TEXTS, rendered, strict=True):
        expected = tokenizer.apply_chat_template(
            [user(text)],
            chat_template=DEMO_TEMPLATE.read_text("utf-8"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        assert list(ids) == expected


@pytest.mark.parametrize("chunk", [1, 2, 200])
def test_rows_come_out_the_same_many_at_a_time_and_one_by_one(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(rows_, "_CHUNK_ROWS", chunk)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    chat = ChatSettings(template=str(template))
    source = write_lines(tmp_path / "a.jsonl", ROWS)
    seen = []
    for renderer in (ChatRenderer(tokenizer, chat), OneByOne(tokenizer, chat)):
        manifest = prepare(make_preparation(source, renderer, context_tokens=2048 + 150))
        prompts = list(read_prompts(manifest))
        seen.append((prompts, list(read_rejects(manifest)), {**manifest.to_json(), "key": ""}))
        reasons = [
            "bad_json",
            "unknown_role",
            "template_error",
            "tools_not_rendered",
            "too_long",
            "control_token",
        ]
        assert [reject.reason for reject in seen[-1][1]] == reasons
        assert [row.row for row in prompts] == [0, 4, 7]
    assert seen[0] == seen[1]


def test_text_that_cannot_be_encoded_is_one_reject_and_no_more(renderer: ChatRenderer) -> None:
    fine, broken = renderer.render_many([([user("fine")], None), ([user("\ud800")], None)])
    assert list(fine) == renderer.render([user("fine")], None)
    assert isinstance(broken, PromptRejected)


def test_tokenizer_that_renders_or_encodes_in_its_own_way_is_asked_row_by_row(tokenizer: Any) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            ids = [len(json.dumps(conversation))]
            return ids if kwargs["tokenize"] else "text"

    assert make_encoder(tokenizer) is not None
    own = copy.copy(tokenizer)
    own.__class__ = Own
    assert make_encoder(own) is None
    rendered = ChatRenderer(own, ChatSettings()).render_many([([user("a")], None), ([user("bcd")], None)])
    assert rendered == [[34], [36]]


@pytest.fixture(scope="module")
def encode(tokenizer: Any) -> InPieces:
    made = make_encoder(tokenizer)
    assert isinstance(made, InPieces)
    return made


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), max_size=6))
def test_texts_in_pieces_have_the_ids_of_the_whole(
    tokenizer: Any, encode: InPieces, texts: list[str]
) -> None:
    encode._seen.clear()
    expected = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert [list(ids) for ids in encode(texts)] == expected
    assert [list(ids) for ids in encode(texts)] == expected, "from what is remembered"


@pytest.mark.parametrize("patterns", sorted(encoding._APART), ids=range(len(encoding._APART)))
@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(CHARACTERS) | st.characters(exclude_categories=["Cs"]), max_size=30))
def test_words_are_what_the_pattern_makes_of_the_whole(patterns: tuple[str, ...], text: list[str]) -> None:
    splits = [Split(Regex(pattern), "isolated") for pattern in patterns if pattern != encoding._GPT_2]
    cut = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=not splits)]).pre_tokenize_str
    words = split_words("".join(text))
    assert "".join(words) == "".join(text)
    pieces = [piece for word in words for piece, _ in cut(word)]
    assert pieces == [piece for piece, _ in cut("".join(text))]


def test_what_is_remembered_stays_small(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_REMEMBERED", 1000)
    encode = make_encoder(tokenizer)
    assert isinstance(encode, InPieces)
    texts = [f"<|im_start|>system<|im_end|>number {n}" + ", nothing more" * 100 for n in range(50)]
    for text in texts:
        assert list(encode([text])[0]) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert sum(map(len, encode._seen)) < 1000 + 2 * len(text)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, True),
        ({"pattern": {"Regex": r"\S+ \S+|\s+"}}, False),
        ({"pattern": {"String": " "}}, False),
        ({"behavior": "MergedWithNext"}, False),
    ],
)
def test_text_is_cut_in_words_where_that_is_known_to_be_right(
    tokenizer: Any, change: dict[str, Any], words: bool
) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    assert encoding._splits_words(described)
    split = {"type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": False} | change
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    assert encoding._splits_words(described) == words
    described["added_tokens"].append({"content": "two words", "normalized": True})
    assert not encoding._splits_words(described)


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": "_",
                "prepend_scheme": "first",
                "split": True,
            }
        },
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
    ],
)
def test_text_is_left_whole_where_its_place_matters(tokenizer: Any, change: dict[str, Any]) -> None:
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    assert encoding._separators(described)
    assert not encoding._separators(described | change)
    described["added_tokens"][0]["lstrip"] = True
    assert not encoding._separators(described)


def test_encoder_takes_back_the_truncation_of_the_tokenizers_file(tokenizer: Any) -> None:
    cut = copy.deepcopy(tokenizer)
    cut.backend_tokenizer.enable_truncation(4)
    encode = make_encoder(cut)
    assert encode is not None
    [ids] = encode(["one two three four five six"])
    assert list(ids) == tokenizer("one two three four five six", add_special_tokens=False)["input_ids"]
