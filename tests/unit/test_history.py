"""A conversation answered turn by turn: what of the earlier turns is in the prompt, and that rows say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import byte_tokenizer, make_answer, make_preparation, user, write_lines

from promptmill.chat import ChatRenderer
from promptmill.generation.prompts import PromptMaker
from promptmill.prompts.manifest import prepare, read_prompts
from promptmill.release.views import Asked, rows_of
from promptmill.settings import ChatSettings
from promptmill.types import Manifest, Prompt, PromptRow

_LAST_ONLY = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}<|assistant|><think>"
)
_ALL = _LAST_ONLY.replace(" and loop.last", "")
_ROW = {
    "id": "v1",
    "messages": [
        {"role": "system", "content": "Be brief."},
        user("3*4?"),
        {"role": "assistant", "content": "11", "reasoning_content": "wrong, and not the model's"},
        user("plus 1?"),
    ],
}


def renderer_of(template: str) -> ChatRenderer:
    return ChatRenderer(byte_tokenizer(template, (), ("<think>", "</think>")), ChatSettings())


def prepared(folder: Path, renderer: ChatRenderer, mode: str) -> tuple[Manifest, PromptRow]:
    source = write_lines(folder / "a.jsonl", [_ROW])
    manifest = prepare(make_preparation(source, renderer, {"mode": mode}))
    (row,) = read_prompts(manifest)
    return manifest, row


def second_turn(renderer: ChatRenderer, manifest: Manifest, row: PromptRow, answer: Any) -> Prompt:
    store: Any = None  # what follows an answer needs none
    maker = PromptMaker(store, manifest, renderer, False, list)
    first = Prompt(row.prompt_hashes[0][0], "A", row.input_ids, 0, 0, 64, row, row.turns[0])
    following = maker.following(first, answer)
    assert following is not None
    return following


@pytest.mark.parametrize(("template", "shown"), [(_LAST_ONLY, "none"), (_ALL, "all")])
def test_rollout_serves_its_own_answers_as_the_template_does(
    tmp_path: Path, template: str, shown: str
) -> None:
    renderer = renderer_of(template)
    manifest, row = prepared(tmp_path, renderer, "rollout")
    first, second = row.prompt_hashes[0]
    answer = make_answer(first, content="12", reasoning="three fours", prompt_ids=row.input_ids)
    prompt = second_turn(renderer, manifest, row, answer)
    thought = "<think>three fours</think>" if shown == "all" else ""
    assert renderer.decode_all(prompt.input_ids) == (
        f"<|system|>Be brief.<|user|>3*4?<|assistant|>{thought}12<|user|>plus 1?<|assistant|><think>"
    )
    answers = {first: answer, second: make_answer(second, turn=1, prompt_ids=prompt.input_ids)}
    asked = Asked("A", "rollout", renderer.fingerprint(), renderer.shows_reasoning)
    rows = list(rows_of("turns", asked, row, answers))
    assert [(r["mode"], r["earlier_reasoning"]) for r in rows] == [("rollout", None), ("rollout", shown)]
    (whole,) = rows_of("conversations", asked, row, answers)
    assert whole["earlier_reasoning"] == shown
    assert [message["role"] for message in whole["conversations"]] == [
        "system", "user", "assistant", "user", "assistant",
    ]  # fmt: skip


def test_last_turn_keeps_system_and_history_as_they_came(tmp_path: Path) -> None:
    renderer = renderer_of(_LAST_ONLY)
    _, row = prepared(tmp_path, renderer, "last_turn")
    assert renderer.decode_all(row.input_ids) == (
        "<|system|>Be brief.<|user|>3*4?<|assistant|>11<|user|>plus 1?<|assistant|><think>"
    )
    ((only,),) = row.prompt_hashes
    asked = Asked("A", "last_turn", renderer.fingerprint(), renderer.shows_reasoning)
    (turn,) = rows_of("turns", asked, row, {only: make_answer(only, prompt_ids=row.input_ids)})
    assert (turn["mode"], turn["earlier_reasoning"]) == ("last_turn", "none")
