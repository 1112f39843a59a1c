from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from helpers import make_answer, make_row, user

from promptmill.release.views import SCHEMAS, Asked, rows_of
from promptmill.types import Answer, PromptRow

ASKED = Asked("A", "rollout", "f00", lambda messages, ids: f"{len(messages)} to {len(ids)}")


def rows(view: str, row: PromptRow, *answers: Answer) -> list[dict[str, Any]]:
    """As a reader gets them: through the view's schema."""
    made = list(rows_of(view, ASKED, row, {answer.prompt_hash: answer for answer in answers}))
    loaded: list[dict[str, Any]] = pa.Table.from_pylist(made, schema=SCHEMAS[view]).to_pylist()
    assert all(row.keys() == set(SCHEMAS[view].names) for row in made)
    return loaded


def two_turns() -> PromptRow:
    return make_row(turns=[[user("a")], [user("b")]], prompt_hashes=[["h0", "h1"]])


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    absent = dict.fromkeys(("reasoning_content", "tool_calls", "tool_call_id", "name"))
    return {"role": role, "content": content, **absent, **more}


def test_turns_mask_is_one_exactly_on_generated_ids() -> None:
    answer = make_answer(prompt_ids=[1, 2, 3], output_ids=[7, 8, 2])
    (row,) = rows("turns", make_row(), answer)
    assert row["input_ids"] == [1, 2, 3, 7, 8, 2]
    assert row["loss_mask"] == [0, 0, 0, 1, 1, 1]
    assert (row["id"], row["turn"], row["reasoning"], row["content"]) == ("q1", 0, "two and two", "4")


def test_turns_take_the_ids_of_the_answer_not_of_the_row() -> None:
    answer = make_answer("h1", turn=1, prompt_ids=[1, 7, 8, 9], output_ids=[5])
    first, second = rows("turns", two_turns(), make_answer(), answer)
    assert [first["id"], second["id"]] == ["q1#turn0", "q1#turn1"]
    assert second["input_ids"] == [1, 7, 8, 9, 5]
    assert second["loss_mask"] == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("status", ["truncated", "flagged", "empty"])
def test_turns_keep_what_conversations_leave_out(status: str) -> None:
    answer = make_answer(status=status, finish_reason="length", flags=["clipped"])
    (row,) = rows("turns", make_row(), answer)
    assert (row["finish_reason"], row["flags"]) == ("length", ["clipped"])
    assert rows("conversations", make_row(), answer) == []


def test_answers_without_ids_are_conversations_and_no_turns() -> None:
    answer = make_answer(prompt_ids=[], output_ids=[], flags=["no_ids"])
    assert rows("turns", make_row(), answer) == []
    (row,) = rows("conversations", make_row(), answer)
    assert row["flags"] == ["no_ids"]


def test_failed_and_missing_answers_are_in_no_view() -> None:
    for view in SCHEMAS:
        assert rows(view, make_row(), make_answer(status="failed", output_ids=[])) == []
        assert rows(view, make_row()) == []


def test_conversation_has_every_message_and_its_reasoning() -> None:
    (row,) = rows("conversations", two_turns(), make_answer(), make_answer("h1", turn=1, content="5"))
    assert row["conversations"] == [
        message("user", "a"),
        message("assistant", "4", reasoning_content="two and two"),
        message("user", "b"),
        message("assistant", "5", reasoning_content="two and two"),
    ]
    assert (row["id"], row["conversation_id"], row["status"]) == ("q1", "q1", "success")
    assert (row["prompt_hash"], row["completion_tokens"], row["reasoning_tokens"]) == ("h1", 4, 2)


@pytest.mark.parametrize(
    "answers",
    [
        [make_answer()],
        [make_answer("h1", turn=1)],
        [make_answer(status="flagged"), make_answer("h1", turn=1)],
        [make_answer(), make_answer("h1", turn=1, status="truncated")],
        [make_answer(), make_answer("h1", turn=1, status="failed")],
    ],
)
def test_conversation_is_whole_and_unflagged_or_left_out(answers: list[Answer]) -> None:
    assert rows("conversations", two_turns(), *answers) == []


def test_turns_of_a_conversation_end_where_it_broke() -> None:
    cut = make_answer(status="truncated")
    flagged = make_answer(status="flagged")
    after = make_answer("h1", turn=1)
    assert [row["turn"] for row in rows("turns", two_turns(), cut, after)] == [0]
    assert [row["turn"] for row in rows("turns", two_turns(), flagged, after)] == [0, 1]
    assert rows("turns", two_turns(), after) == []


def test_samples_are_rows_of_their_own() -> None:
    row = make_row(prompt_hashes=[["h0"], ["h1"]])
    answers = (make_answer(), make_answer("h1", sample=1, content="four"))
    for view in SCHEMAS:
        found = [(r["id"], r["sample"], r["prompt_hash"]) for r in rows(view, row, *answers)]
        assert found == [("q1#0", 0, "h0"), ("q1#1", 1, "h1")]
    assert [r["id"] for r in rows("turns", row, answers[1])] == ["q1#1"]


def test_samples_of_several_turns_name_both() -> None:
    row = make_row(turns=[[user("a")], [user("b")]], prompt_hashes=[["h0", "h1"], ["h2", "h3"]])
    answers = [make_answer("h2", sample=1), make_answer("h3", sample=1, turn=1)]
    assert [r["id"] for r in rows("turns", row, *answers)] == ["q1#1#turn0", "q1#1#turn1"]
    assert [r["conversation_id"] for r in rows("conversations", row, *answers)] == ["q1#1"]


def test_tool_calls_and_tools_are_json_where_they_vary() -> None:
    calls = [
        {"id": "t0", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "ö": "four"}}},
        {"id": 1, "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
        {"name": "flat", "arguments": {"n": 4}},
    ]
    asked = [
        user("a"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t0", "content": "7", "name": "add"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}]
    (row,) = rows("conversations", make_row(turns=[asked], tools=tools), make_answer())
    assert row["conversations"][1]["tool_calls"] == [
        {"id": "t0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "ö": "four"}'}},
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}},
        {"id": None, "type": None, "function": {"name": "flat", "arguments": '{"n": 4}'}},
    ]
    assert row["conversations"][2] == message("tool", "7", tool_call_id="t0", name="add")
    assert row["tools"] == (
        '[{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}]'
    )


def test_views_say_where_an_answer_is_from() -> None:
    answer = make_answer(kv_dtype="fp8_e4m3", server="life-3", resumed_tokens=1)
    for view in SCHEMAS:
        (row,) = rows(view, make_row(), answer)
        assert row["partition"] == "A"
        assert (row["model"], row["model_revision"]) == ("some/model", "revision-1")
        assert (row["kv_dtype"], row["server"], row["resumed_tokens"]) == ("fp8_e4m3", "life-3", 1)
        assert row["prompt_tokens"] == 3


def test_views_say_how_a_prompt_was_made() -> None:
    """Of a conversation, the last prompt; of a turn, its own."""
    answers = (make_answer(), make_answer("h1", turn=1, prompt_ids=[1, 2, 3, 4]))
    (whole,) = rows("conversations", two_turns(), *answers)
    assert (whole["mode"], whole["renderer"], whole["earlier_reasoning"]) == ("rollout", "f00", "3 to 4")
    assert [r["earlier_reasoning"] for r in rows("turns", two_turns(), *answers)] == ["1 to 3", "3 to 4"]


def test_answer_that_was_cut_inside_its_reasoning_has_no_content() -> None:
    cut = make_answer(
        status="truncated", finish_reason="length", flags=["reasoning_never_closed"], content=""
    )
    (row,) = rows("turns", make_row(), cut)
    assert (row["reasoning"], row["content"]) == ("two and two", None)
    assert rows("conversations", make_row(), cut) == []
