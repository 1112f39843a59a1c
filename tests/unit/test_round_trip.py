"""What is read is what is asked, kept and released, letter by letter; and what is equal is asked once."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import make_preparation, make_profile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from promptmill.chat import ChatRenderer
from promptmill.prompts.manifest import prepare, read_prompts, read_rejects
from promptmill.release.shards import Shards
from promptmill.release.views import SCHEMAS, Asked, rows_of
from promptmill.store.store import Store
from promptmill.types import Answer, Manifest, PromptRow
from tests.helpers_store import answer

few = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

Row = dict[str, Any]

# SmolLM2 has no tokens for these control characters, nor for the bytes that start what lies beyond U+40000,
# where nothing is assigned: its tokenizer leaves them out.
LOST = "\x04\x06\x13\x14\x16\x1d"
words = st.text(
    st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters=LOST), min_size=1, max_size=40
)
odd = st.sampled_from(
    [
        "007",
        "null",
        '{"a": 1}',
        "  indented\n\ttext \r\n",
        "nul \0",
        "\u202eRTL\u202c\u200b\ufeff",
        "e\u0301 é",
        "👩‍👩‍👧",
        "\x85\u2028",
    ]
)
texts = st.one_of(words, odd).filter(lambda text: bool(text.strip()))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
tools = st.fixed_dictionaries({"name": words, "parameters": st.dictionaries(words, json_values, max_size=3)})


@st.composite
def conversations(draw: st.DrawFn) -> Row:
    """A row of messages: perhaps a system, some exchanges with calls among them, and a question."""
    messages: list[Row] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for number in range(draw(st.integers(0, 2))):
        messages.append({"role": "user", "content": draw(texts)})
        if draw(st.booleans()):
            call = {
                "id": f"c{number}",
                "type": "function",
                "function": {"name": "f", "arguments": draw(words)},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(texts), "tool_call_id": f"c{number}"})
        messages.append({"role": "assistant", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    row: Row = {"messages": messages}
    if draw(st.booleans()):
        row["tools"] = draw(st.lists(tools, min_size=1, max_size=2))
    return row


def write_lines(path: Path, rows: list[Row]) -> None:
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def write_array(path: Path, rows: list[Row]) -> None:
    path.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")


def write_gzip(path: Path, rows: list[Row]) -> None:
    path.write_bytes(gzip.compress(b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows)))


def write_parquet(path: Path, rows: list[Row]) -> None:
    """Messages and tools as JSON text: as structs every member would have every key of all."""
    flat = [{k: v if k == "id" else json.dumps(v) for k, v in row.items()} for row in rows]
    schema = pa.schema([("id", pa.string()), ("messages", pa.large_string()), ("tools", pa.string())])
    pq.write_table(pa.Table.from_pylist(flat, schema), path)


WRITERS: list[Callable[[Path, list[Row]], None]] = [write_lines, write_array, write_gzip, write_parquet]


def prepared(folder: Path, name: str, write: Any, rows: list[Row], renderer: ChatRenderer) -> Manifest:
    folder.mkdir()
    write(folder / "rows", rows)
    part = {"name": name, "format": "messages", "policies": {"control_tokens": "keep"}}
    manifest = prepare(make_preparation(folder / "rows", renderer, part))
    assert manifest.rows == manifest.prompts == len(rows), list(read_rejects(manifest))
    return manifest


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def released(path: Path, manifest: Manifest, answers: dict[str, Answer]) -> list[Row]:
    """The rows of `conversations`, from the file."""
    asked = Asked(manifest.partition, "last_turn", "renderer", lambda *_: None)
    with Shards(path / "data", manifest.partition, SCHEMAS["conversations"], 10_000_000) as shards:
        for prompt in read_prompts(manifest):
            shards.add(rows_of("conversations", asked, prompt, answers))
        files = shards.finish(always=True)
    return [row for file, _ in files for row in pq.read_table(file).to_pylist()]


def answered(path: Path, prompts: list[PromptRow], content: str) -> dict[str, Answer]:
    """Answers through journal and segment, as another process finds them."""
    profile = make_profile(store={"url": str(path / "store")})
    hashes = {prompt.prompt_hashes[0][0] for prompt in prompts}
    store = Store(profile)
    store.open("test")
    try:
        for future in [store.put(answer(h, content=content, reasoning=content)) for h in hashes]:
            future.result(20)
        assert store.seal_all() == len(hashes)
    finally:
        store.close()
    again = Store(profile)
    again.refresh()
    return again.lookup(hashes)


def said(message: Row) -> Row:
    return {key: value for key, value in message.items() if value is not None}


@few
@given(rows=st.lists(conversations(), min_size=1, max_size=4), write=st.sampled_from(WRITERS), content=texts)
def test_text_is_the_same_from_the_file_to_the_release(
    renderer: ChatRenderer, rows: list[Row], write: Any, content: str
) -> None:
    with folder() as path:
        numbered = [{"id": f"r{i}", **row} for i, row in enumerate(rows)]
        manifest = prepared(path / "in", "A", write, numbered, renderer)
        prompts = list(read_prompts(manifest))
        found = answered(path, prompts, content)
        for row, prompt, out in zip(rows, prompts, released(path, manifest, found), strict=True):
            assert prompt.turns == [row["messages"]]
            shown = renderer.decode_all(prompt.input_ids)
            assert all(message["content"] in shown for message in row["messages"])
            *history, last = out["conversations"]
            assert [said(message) for message in history] == row["messages"]
            assert said(last) == {"role": "assistant", "content": content, "reasoning_content": content}
            wrapped = [{"type": "function", "function": tool} for tool in row.get("tools", [])]
            assert json.loads(out["tools"] or "[]") == (prompt.tools or []) == wrapped


@few
@given(
    rows=st.lists(
        conversations(), min_size=1, max_size=5, unique_by=lambda row: orjson.dumps(row["messages"])
    ),
    forms=st.tuples(st.sampled_from(WRITERS), st.sampled_from(WRITERS)),
    order=st.randoms(use_true_random=False),
)
def test_equal_content_has_equal_hashes_wherever_it_stands(
    renderer: ChatRenderer, rows: list[Row], forms: tuple[Any, Any], order: Any
) -> None:
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    shuffled.append(shuffled[0])
    with folder() as path:
        named = [{"id": f"r{i}", **row} for i, row in enumerate(rows)]
        moved = [{"id": f"other-{n}", **rows[i]} for n, i in enumerate(shuffled)]
        one = [p.prompt_hashes for p in read_prompts(prepared(path / "1", "A", forms[0], named, renderer))]
        other = prepared(path / "2", "B", forms[1], moved, renderer)
        assert [p.prompt_hashes for p in read_prompts(other)] == [one[i] for i in shuffled]
        assert other.notes["duplicate_joined"] == 1
        assert len({str(h) for h in one}) == len(rows)
