from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import make_preparation, user, write_lines

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError, StoreError
from promptmill.model import Model
from promptmill.prompts import manifest as manifest_module
from promptmill.prompts.hashing import digest
from promptmill.prompts.manifest import (
    Keys,
    Preparation,
    load_current,
    make_current,
    prepare,
    read_keys,
    read_prompts,
    read_rejects,
)
from promptmill.types import Manifest, PromptRow

TAKE_TURNS = (
    "{% for m in messages %}{% if (m.role=='user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles have to take turns') }}{% endif %}<{{m.role}}>{{m.content}}{% endfor %}"
)


def prompts(*texts: str) -> list[dict[str, str]]:
    return [{"id": f"q{i}", "prompt": text} for i, text in enumerate(texts)]


@pytest.fixture
def prepared(tmp_path: Path, renderer: ChatRenderer) -> Callable[..., Manifest]:
    """Prepares rows; what else is given goes to make_preparation."""

    def run(rows: list[Any], partition: dict[str, Any] | None = None, **more: Any) -> Manifest:
        source = write_lines(tmp_path / "a.jsonl", rows)
        return prepare(make_preparation(source, more.pop("renderer", renderer), partition, **more))

    return run


@pytest.fixture
def hashes(prepared: Callable[..., Manifest]) -> Callable[..., list[list[list[str]]]]:
    return lambda *args, **more: list(read_keys(prepared(*args, **more)))


def rows_of(manifest: Manifest) -> list[PromptRow]:
    return list(read_prompts(manifest))


def reasons(manifest: Manifest) -> list[tuple[str, str]]:
    """(line, reason) of every reject."""
    return [(r.location.rpartition(":")[2], r.reason) for r in read_rejects(manifest)]


def test_manifest_counts_sum_to_the_rows_read(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    rows = [*prompts("one", " ", "two"), "", "not json", {"id": "x"}, "[1]", *prompts("three")]
    manifest = prepared(rows)
    assert (manifest.rows, manifest.prompts, sum(manifest.rejected.values())) == (7, 3, 4)
    assert manifest.rejected == {"empty_prompt": 1, "bad_json": 1, "no_prompt": 1, "not_an_object": 1}
    assert [(row.row, row.location) for row in rows_of(manifest)] == [
        (n, f"{tmp_path}/a.jsonl:{line}") for n, line in ((0, 1), (2, 3), (6, 8))
    ]
    expected = [("2", "empty_prompt"), ("5", "bad_json"), ("6", "no_prompt"), ("7", "not_an_object")]
    assert reasons(manifest) == expected


def test_manifest_holds_what_the_renderer_made(
    prepared: Callable[..., Manifest], renderer: ChatRenderer
) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"maximum": 5, "deep": [[{}]]}}}
    manifest = prepared([{"id": "007", "messages": [user("föx 🦊")], "tools": [tool]}, {"messages": []}])
    (row,) = rows_of(manifest)
    assert (row.id, row.turns, row.tools) == ("007", [[user("föx 🦊")]], [tool])
    assert row.input_ids == renderer.render([user("föx 🦊")], [tool])
    assert manifest.format == "messages"
    assert manifest.prompt_tokens == manifest.longest_prompt == len(row.input_ids)


def test_manifest_token_counts(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared(prompts("one", "one two three four"))
    lengths = [len(row.input_ids) for row in rows_of(manifest)]
    assert (manifest.prompt_tokens, manifest.longest_prompt) == (sum(lengths), max(lengths))
    assert lengths[0] < lengths[1]


def test_manifest_of_an_empty_source_has_no_rows(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared([])
    assert (manifest.rows, manifest.prompts, manifest.rejected) == (0, 0, {})
    assert rows_of(manifest) == []


def test_manifest_keeps_three_examples_a_reason(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared([*prompts("one"), *["no"] * 5, {"x": 1}])
    assert manifest.rejected == {"bad_json": 5, "no_prompt": 1}
    assert [example.split(": ")[1] for example in manifest.examples] == ["bad_json"] * 3 + ["no_prompt"]


def test_manifest_survives_json(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared([*prompts("one"), "no"])
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def test_manifest_crosses_its_batches_in_order(
    prepared: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_module, "_BATCH", 2)
    for n in (4, 5):
        manifest = prepared(prompts(*(str(i) for i in range(n))))
        rows = rows_of(manifest)
        assert [row.id for row in rows] == [f"q{i}" for i in range(n)]
        assert list(read_keys(manifest)) == [row.prompt_hashes for row in rows]


@pytest.mark.parametrize("chosen", [set(), {0}, {1, 4}, {2, 3}, set(range(6))])
def test_wanted_rows_alone_are_read_and_told_by_their_hashes(
    prepared: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, chosen: set[int]
) -> None:
    monkeypatch.setattr(manifest_module, "_BATCH", 2)
    monkeypatch.setattr(manifest_module, "_ROWS_OF_KEYS", 4)
    texts = ["a", ["b", "c", "d"], "e", ["f", "g"], "h", "i"]
    rows = [{"id": str(i), "turns": [t] if isinstance(t, str) else t} for i, t in enumerate(texts)]
    manifest = prepared(rows, sampling={"samples": 2})
    whole = rows_of(manifest)
    keys = {digest(row.prompt_hashes[0][0]).rstrip(b"\0"): i for i, row in enumerate(whole)}

    def wanted(some: Keys) -> Any:
        first = some.digests[some.chains[some.rows]].tolist()
        return np.array([keys[key] in chosen for key in first])

    expected = [row for i, row in enumerate(whole) if i in chosen]
    assert list(read_prompts(manifest, wanted)) == expected
    assert list(read_keys(manifest, wanted)) == [row.prompt_hashes for row in expected]


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_limit_counts_rows_read(prepared: Callable[..., Manifest], limit: int) -> None:
    manifest = prepared([*prompts("one"), "no", *prompts("two", "three")], limit=limit)
    assert manifest.rows == min(limit, 4)
    assert [row.row for row in rows_of(manifest)] == [n for n in (0, 2, 3) if n < limit]


def test_auto_format_goes_by_the_first_row_that_tells(prepared: Callable[..., Manifest]) -> None:
    rows = [{"messages": None}, {"messages": []}, {"messages": [user("a")]}, {"messages": ["b"]}]
    manifest = prepared(rows)
    assert manifest.format == "messages"
    assert reasons(manifest) == [("1", "no_messages"), ("2", "no_messages"), ("4", "bad_message")]


def test_auto_format_without_a_known_column_stops(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"partition A: .*a\.jsonl:1: no column .* among id, body"):
        prepared([{"id": 1, "body": "x"}])
    assert list((tmp_path / "manifests").iterdir()) == []


def test_template_that_raises_rejects_the_row_alone(
    prepared: Callable[..., Manifest], renderer_of: Callable[[str], ChatRenderer]
) -> None:
    rows = [
        {"messages": [user("one"), user("two")]},
        {"messages": [user("one")]},
        {"messages": [{"role": "assistant", "content": "I start"}, user("ok")]},
    ]
    manifest = prepared(rows, renderer=renderer_of(TAKE_TURNS))
    assert manifest.prompts == 1
    assert [(r.reason, r.detail) for r in read_rejects(manifest)] == [
        ("template_error", "roles have to take turns")
    ] * 2


def test_tools_that_the_template_ignores_reject_the_row(
    prepared: Callable[..., Manifest], renderer_of: Callable[[str], ChatRenderer]
) -> None:
    rows = [{"messages": [user("a")], "tools": [{"name": "add"}]}, {"messages": [user("a")], "tools": []}]
    manifest = prepared(rows, renderer=renderer_of(TAKE_TURNS))
    assert reasons(manifest) == [("1", "tools_not_rendered")]
    assert manifest.prompts == 1


def test_prompt_that_leaves_no_room_is_a_reject(prepared: Callable[..., Manifest]) -> None:
    tokens = prepared(prompts("one")).longest_prompt
    more = {"classes": {"short": {"max_new_tokens": 10}}}
    assert prepared(prompts("one"), context_tokens=tokens + 10, **more).prompts == 1
    manifest = prepared(prompts("one"), context_tokens=tokens + 9, **more)
    (reject,) = read_rejects(manifest)
    assert (reject.reason, reject.detail) == (
        "too_long",
        f"{tokens} prompt tokens + 10 to answer exceed the {tokens + 9} of one request",
    )


def test_odd_text_is_kept_or_cleaned_and_never_fatal(prepared: Callable[..., Manifest]) -> None:
    schema = '{"name": "f", "maximum": 1180591620717411303424, "x": ' + "[" * 300 + "]" * 300 + "}"
    rows = [
        r'{"id": "u1", "messages": [{"role": "user", "content": "half \ud83d"}]}',
        r'{"id": "u2", "messages": [{"role": "user", "content": "a"}], "tools": "[{\"name\": \"\\udc97\"}]"}',
        '{"id": "\\ud83d", "messages": [{"role": "user", "content": "a"}], "tools": [' + schema + "]}",
        {"id": "u4", "messages": [{"role": ["user"], "content": "a"}]},
    ]
    manifest = prepared(rows)
    first, second, third = rows_of(manifest)
    assert first.turns == [[user("half \ufffd")]]
    assert second.tools == [{"type": "function", "function": {"name": "\ufffd"}}]
    assert third.id == "\ufffd"
    assert third.tools is not None
    assert third.tools[0]["function"]["maximum"] == 2**70
    assert reasons(manifest) == [("4", "unknown_role")]


def test_hash_ignores_id_order_and_file(
    prepared: Callable[..., Manifest], tmp_path: Path, renderer: ChatRenderer
) -> None:
    one = list(read_keys(prepared(prompts("a", "b"))))
    other = write_lines(tmp_path / "other.jsonl", [{"uuid": "z", "question": "b"}, {"question": "a"}])
    two = list(read_keys(prepare(make_preparation(other, renderer, {"name": "B"}))))
    assert two == one[::-1]
    assert one[0] != one[1]


def test_hash_joins_equal_prompts(hashes: Callable[..., list[list[list[str]]]]) -> None:
    first, second, third = hashes(prompts("same", "other", "same"))
    assert first == third != second


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"server": {"port": 9, "replicas": 2, "flags": {"mem-fraction-static": 0.9}}}, True),
        ({"classes": {"short": {"max_new_tokens": 9}}}, True),
        ({"partition": {"sampling": {"samples": 1}}}, True),
        ({"context_tokens": 100_000}, True),
        ({"sampling": {"temperature": 0.5}}, False),
        ({"partition": {"sampling": {"top_p": 0.5}}}, False),
        ({"model": Model("some/model", "revision-2", "/weights")}, False),
    ],
)
def test_hash_follows_what_decides_the_answer(
    hashes: Callable[..., list[list[list[str]]]], change: dict[str, Any], same: bool
) -> None:
    assert (hashes(prompts("a"), **change) == hashes(prompts("a"))) is same


def test_hash_ignores_a_template_that_renders_the_same(
    hashes: Callable[..., list[list[list[str]]]], renderer_of: Callable[[str], ChatRenderer]
) -> None:
    one = hashes(prompts("a"), renderer=renderer_of("<{{ messages[0].content }}>"))
    two = hashes(prompts("a"), renderer=renderer_of("{# edited #}<{{ messages[-1].content }}>"))
    three = hashes(prompts("a"), renderer=renderer_of("[{{ messages[0].content }}]"))
    assert one == two != three


def test_samples_add_hashes_and_keep_the_first(hashes: Callable[..., list[list[list[str]]]]) -> None:
    (one,) = hashes(prompts("a"))
    (three,) = hashes(prompts("a"), sampling={"samples": 3})
    assert three[:1] == one
    assert len({chain[0] for chain in three}) == 3


def test_later_turns_have_hashes_of_their_history(hashes: Callable[..., list[list[list[str]]]]) -> None:
    rows = [{"turns": ["a", "x", "end"]}, {"turns": ["a", "y", "end"]}, {"turns": ["a"]}]
    (one,), (two,), (short,) = hashes(rows)
    assert [len(chain) for chain in (one, two, short)] == [3, 3, 1]
    assert one[0] == two[0] == short[0]
    assert len({*one, *two}) == 5


def test_later_turns_differ_by_sample(hashes: Callable[..., list[list[list[str]]]]) -> None:
    ((one, two),) = hashes([{"turns": ["a", "b"]}], sampling={"samples": 2})
    assert len({*one, *two}) == 4


def test_digest_follows_the_hashes(prepared: Callable[..., Manifest]) -> None:
    one = prepared(prompts("a", "b")).digest
    assert prepared([{"id": "other", "prompt": "a"}, *prompts("b")]).digest == one
    assert prepared(prompts("b", "a")).digest != one


def test_identity_names_what_the_hashes_cover(
    prepared: Callable[..., Manifest], renderer: ChatRenderer
) -> None:
    manifest = prepared(prompts("a"), {"sampling": {"seed": 3}}, sampling={"samples": 2})
    assert manifest.identity == {
        "model": "some/model",
        "model_revision": "revision-1",
        "chat": renderer.fingerprint(),
        "sampling.temperature": 1.0,
        "sampling.top_p": 1.0,
        "sampling.seed": 3,
    }


@pytest.fixture
def preparation(tmp_path: Path, renderer: ChatRenderer) -> Callable[..., Preparation]:
    source = write_lines(tmp_path / "a.jsonl", prompts("a"))
    return lambda *args, **more: make_preparation(source, more.pop("renderer", renderer), *args, **more)


def test_key_changes_with_the_source(preparation: Callable[..., Preparation], tmp_path: Path) -> None:
    first = preparation().key()
    assert preparation().key() == first
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    touched = preparation().key()
    write_lines(tmp_path / "a.jsonl", prompts("a", "b"))
    os.utime(tmp_path / "a.jsonl", ns=(1, 1))
    assert len({first, touched, preparation().key()}) == 3


def test_key_changes_with_what_the_manifest_says(
    preparation: Callable[..., Preparation], renderer_of: Callable[[str], ChatRenderer]
) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"limit": 1},
        {"context_tokens": 100},
        {"classes": {"short": {"max_new_tokens": 9}}},
        {"sampling": {"samples": 2}},
        {"partition": {"format": "text"}},
        {"partition": {"columns": {"id": "uuid"}}},
        {"partition": {"name": "B"}},
        {"model": Model("some/model", "revision-2", "/weights")},
        {"renderer": renderer_of(TAKE_TURNS)},
        {"chat": {"ignored_tools": "keep"}},
        {"chat": {"tool_arguments": "text"}},
    ]
    keys = [preparation(**change).key() for change in changes]
    assert len(set(keys)) == len(changes)
    assert preparation(server={"port": 9}, release={"url": "r"}).key() == keys[0]


def test_current_manifest_is_found_again(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    assert load_current(folder, "A") is None
    manifest = prepared(prompts("a"))
    assert load_current(folder, "A") is None
    make_current(manifest, folder)
    assert load_current(folder, "A") == manifest
    assert load_current(folder, "B") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"partition": "A"}'])
def test_current_manifest_that_is_torn_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "A.json").write_text(text)
    assert load_current(tmp_path, "A") is None


def test_current_manifest_without_its_files_counts_as_none(
    prepared: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = prepared(prompts("a"))
    make_current(manifest, tmp_path / "manifests")
    Path(manifest.rejects_path).unlink()
    assert load_current(tmp_path / "manifests", "A") is None


def test_place_that_takes_no_manifest_is_said(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("a file")
    with pytest.raises(ConfigError, match="manifests: prepared prompts cannot be kept there: "):
        prepared(prompts("a"))
    assert load_current(tmp_path / "manifests", "A") is None


def test_current_manifest_whose_prompts_are_torn_counts_as_none(
    prepared: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = prepared(prompts("a"))
    make_current(manifest, tmp_path / "manifests")
    whole = Path(manifest.path).read_bytes()
    for size in (0, 4, len(whole) // 2, len(whole) - 1):
        Path(manifest.path).write_bytes(whole[:size])
        assert load_current(tmp_path / "manifests", "A") is None
    Path(manifest.path).write_bytes(whole)
    assert load_current(tmp_path / "manifests", "A") == manifest


def test_damaged_files_of_a_manifest_are_named(prepared: Callable[..., Manifest]) -> None:
    manifest = prepared(prompts("a"))
    path, rejects = Path(manifest.path), Path(manifest.rejects_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * (len(whole) // 2) + whole[4 + len(whole) // 2 :])
    rejects.write_text('{"loc')
    for reading, file in ((read_prompts, path), (read_keys, path), (read_rejects, rejects)):
        with pytest.raises(StoreError, match=f"{file.name} is damaged: .* Delete it"):
            list(reading(manifest))


def test_make_current_prunes_its_own_partition_only(tmp_path: Path, renderer: ChatRenderer) -> None:
    folder, source = tmp_path / "manifests", tmp_path / "a.jsonl"
    names = ("B1", "B1-x", "B1.x", "B10", "b1")
    kept = {}
    for name in names:
        for texts in (("a",), ("a", "b")):
            write_lines(source, prompts(*texts))
            kept[name] = prepare(make_preparation(source, renderer, {"name": name}))
    assert len(list(folder.iterdir())) == 2 * 2 * len(names)
    others = {p.name for p in folder.iterdir() if not p.name.startswith("B1-") or p.name.startswith("B1-x")}
    make_current(kept["B1"], folder)
    left = {p.name for p in folder.iterdir()}
    own = {"B1.json", Path(kept["B1"].path).name, Path(kept["B1"].rejects_path).name}
    assert left == others | own


def test_interrupted_preparation_leaves_nothing(
    preparation: Callable[..., Preparation], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare(preparation())
    assert list((tmp_path / "manifests").iterdir()) == []
