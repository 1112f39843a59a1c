"""Input that has gone wrong for people, file by file, and what has to become of it."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, make_preparation, user

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.prompts.manifest import prepare, read_prompts, read_rejects
from promptmill.types import Manifest, Message, PromptRow

DATA = Path(__file__).parent / "data"
SHARED = ROOT.parent / "shared"
CHANGED = ("I01", "I05", "I14")
"""Of these the text is not what stands there letter by letter: taken apart, cleaned, joined."""

Prepared = Callable[..., Manifest]


@pytest.fixture
def prepared(tmp_path: Path, renderer: ChatRenderer) -> Prepared:
    """Prepares a file of data/, or one that is given whole; the rest is as in make_preparation."""

    def run(source: str | Path, partition: dict[str, Any] | None = None, **more: Any) -> Manifest:
        path = source if isinstance(source, Path) else DATA / source
        preparation = make_preparation(path, more.pop("renderer", renderer), partition, **more)
        return prepare(replace(preparation, folder=tmp_path / "manifests"))

    return run


def rows(manifest: Manifest) -> list[PromptRow]:
    return list(read_prompts(manifest))


def by_id(manifest: Manifest) -> dict[str, list[Message]]:
    """The messages of prompts with one turn."""
    return {row.id.rpartition("/")[2]: row.turns[0] for row in rows(manifest)}


def asked(manifest: Manifest) -> dict[str, str]:
    return {id_: turn[-1]["content"] for id_, turn in by_id(manifest).items()}


def rejects(manifest: Manifest) -> dict[int, str]:
    """Reason by line."""
    return {int(r.location.rpartition(":")[2]): r.reason for r in read_rejects(manifest)}


def call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "function": function, "id": f"functions.{name}:{number}"}


def test_glaive_v2_comes_apart_at_its_roles_alone(prepared: Prepared) -> None:
    manifest = prepared("I01.jsonl")
    tide, log, two = rows(manifest)
    assert (manifest.format, manifest.column, manifest.rejected) == ("glaive", "chat", {})
    assert tide.tools is not None
    assert [tool["function"]["name"] for tool in tide.tools] == ["tide_time"]
    assert tide.turns[0][1:] == [
        user("When is high tide at Port Elda?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("tide_time", '{"harbour": "Port Elda"}')],
        },
        {
            "role": "tool",
            "content": '{"next": "14:05", "note": "it\'s spring tide"}',
            "tool_call_id": "functions.tide_time:0",
        },
        {"role": "assistant", "content": "High tide is at 14:05."},
        user("Thanks!"),
    ]
    assert log.turns[0][1:] == [user("Explain the log line 'USER: root logged in'.")]
    assert log.tools is None
    assert two.tools is not None
    assert [tool["function"]["name"] for tool in two.tools] == ["a", "b"]
    assert two.turns[0][0] == {"role": "system", "content": "Two tools."}
    assert two.turns[0][2]["tool_calls"] == [call("a", '{"text": "don\'t stop"}')]
    assert two.turns[0][3] == {"role": "tool", "content": "", "tool_call_id": "functions.a:0"}
    assert manifest.notes == {"last_assistant_dropped": 2, "empty_answer_dropped": 2}
    assert "<functioncall>" not in Path(manifest.path).read_bytes().decode("latin-1")


def test_glaive_v1_is_one_column(prepared: Prepared) -> None:
    manifest = prepared("I01b_v1.jsonl")
    (row,) = rows(manifest)
    assert (manifest.format, manifest.column) == ("glaive", "sample")
    assert row.turns[0][1:] == [
        user("roll two dice"),
        {"role": "assistant", "content": "", "tool_calls": [call("dice", '{"n": 2}')]},
        {"role": "tool", "content": '{"rolls": [3, 5]}', "tool_call_id": "functions.dice:0"},
    ]
    assert row.tools == [{"type": "function", "function": {"name": "dice"}}]


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ({"at_least": 0.5}, None),
        ({"at_least": 1, "at_most": 1}, None),
        ({"at_least": 1.01}, "filtered_out"),
        ({"one_of": ["1"]}, None),
        ({"one_of": ["1.0"]}, "filtered_out"),
    ],
)
def test_scores_that_are_text_are_read_as_numbers_where_it_is_asked(
    prepared: Prepared, where: dict[str, Any], reason: str | None
) -> None:
    condition = {"column": "average_test_score", **where}
    manifest = prepared("I02.jsonl", {"where": [condition]})
    if reason is None:
        (row,) = rows(manifest)
        assert (manifest.format, row.id) == ("opencodeinstruct", "oc-17")
        assert row.turns[0][0]["content"].startswith("Write a function `first_gap(xs)`")
    assert list(rejects(manifest).values()) == ([reason] if reason else [])


def test_condition_on_what_is_no_number_is_a_reject(prepared: Prepared) -> None:
    manifest = prepared("I02.jsonl", {"where": [{"column": "domain", "at_least": 1}]})
    assert rejects(manifest) == {1: "not_a_number"}


def test_sharegpt_rejects_rows_and_never_the_file(prepared: Prepared) -> None:
    manifest = prepared("I03.jsonl")
    first, other_keys = rows(manifest)
    assert manifest.format == "sharegpt"
    assert first.turns[0] == [
        {"role": "system", "content": "Use tools."},
        user("Weather in Oslo?"),
        {"role": "assistant", "content": "", "tool_calls": [call("wx", {"city": "Oslo"})]},
        {"role": "tool", "content": '{"t": -3}', "tool_call_id": "functions.wx:0"},
    ]
    assert first.tools == [{"type": "function", "function": {"name": "wx"}}]
    assert other_keys.turns == [[user("same column, other keys")]]
    expected = {2: "unknown_role", 4: "bad_message", 5: "no_messages", 6: "no_messages"}
    assert rejects(manifest) == expected


def test_last_assistant_turn_is_answered_anew_and_counted(prepared: Prepared) -> None:
    manifest = prepared("I04.jsonl")
    assert asked(manifest) == {"a1": "Name a prime.", "a3": "Continue: once upon"}
    assert rejects(manifest) == {2: "nothing_to_answer"}
    assert manifest.notes == {"last_assistant_dropped": 2}
    refused = prepared("I04.jsonl", {"policies": {"last_assistant": "reject"}})
    assert rejects(refused) == {1: "last_is_assistant", 2: "nothing_to_answer", 3: "last_is_assistant"}


def test_lone_surrogates_alone_are_changed_and_counted(prepared: Prepared) -> None:
    manifest = prepared("I05.jsonl")
    assert asked(manifest) == {
        "u1": "half a pair: \ufffd end",
        "u2": "good pair: 🚀",
        "u3": "escaped byte: \ufffd",
        "u4": "nul \0 inside",
        "u5": "\u202eRTL override\u202c \u200bzero width \ufeff",
        "u6": "e\u0301 vs é",
    }
    assert manifest.notes == {"surrogates_replaced": 2, "nul_kept": 1}
    refused = prepared("I05.jsonl", {"policies": {"surrogates": "reject", "nul": "reject"}})
    assert rejects(refused) == {1: "lone_surrogate", 3: "lone_surrogate", 4: "nul"}
    dropped = prepared("I05.jsonl", {"policies": {"nul": "drop"}})
    assert asked(dropped)["u4"] == "nul  inside"
    assert dropped.notes["nul_dropped"] == 1


@pytest.mark.parametrize(
    ("name", "ids", "expected"),
    [
        ("I08_nonl.jsonl", ["t1", "t2"], {}),
        ("I08_torn.jsonl", ["t1", "t2"], {3: "cut_line"}),
        ("I08_notobj.jsonl", ["n1", "n2", "n3"], dict.fromkeys((2, 3, 4, 5), "not_an_object")),
        ("I08_array.json", ["j1", "j2"], {}),
        ("I09_misnamed.jsonl", ["z1"], {}),
    ],
)
def test_bad_lines_are_rejects_with_their_place(
    prepared: Prepared, name: str, ids: list[str], expected: dict[int, str]
) -> None:
    manifest = prepared(name)
    assert [row.id for row in rows(manifest)] == ids
    assert rejects(manifest) == expected
    assert manifest.rows == len(ids) + len(expected)


def test_empty_file_is_no_rows(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert prepared(tmp_path / "empty.jsonl").rows == 0


def test_cut_archive_stops_with_the_rows_that_were_read(prepared: Prepared, tmp_path: Path) -> None:
    lines = (json.dumps({"id": i, "prompt": f"{pow(7, i + 900, 1 << 900):x}"}) for i in range(300))
    packed = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match=r"cut\.jsonl\.gz: .* breaks off after 1[0-9]{2} lines"):
        prepared(path)


def test_column_of_mixed_types_is_read_as_it_stands(prepared: Prepared, tmp_path: Path) -> None:
    manifest = prepared("I10.jsonl")
    assert list(asked(manifest).values()) == ["int id", "str id", "null id", "no id", "float id"]
    assert list(asked(manifest)) == ["1", "2", "I10.jsonl:3", "I10.jsonl:4", "I10.jsonl:5"]
    texts = ["2", "007", "true", "null", '{"a":1}']
    path = tmp_path / "a.jsonl"
    mixed = [*({"prompt": t} for t in texts), {"prompt": [{"type": "text"}]}, {"prompt": 42}]
    path.write_text("\n".join(map(json.dumps, mixed)))
    manifest = prepared(path)
    assert list(asked(manifest).values()) == texts
    assert rejects(manifest) == {6: "not_text", 7: "not_text"}


def test_column_that_is_null_in_the_first_rows_is_no_matter(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"id": f"n{i}", "prompt": f"p{i}", "system": None} for i in range(400)]
    path.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "p", "system": "Be brief."}])))
    manifest = prepared(path, {"columns": {"system": "system"}})
    assert manifest.prompts == 401
    assert rows(manifest)[-1].turns == [[{"role": "system", "content": "Be brief."}, user("p")]]


def test_tools_and_arguments_keep_the_keys_that_they_have(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    given = [json.loads(line) for line in (DATA / "I12.jsonl").read_text().splitlines()]
    for row in given:
        row["messages"] += [user("so?")]
    path.write_text("\n".join(map(json.dumps, given)))
    made = rows(prepared(path))
    assert [row.turns[0] for row in made] == [row["messages"] for row in given]
    assert [row.tools and row.tools[0]["function"] for row in made] == [
        row["tools"][0] if row["tools"] else None for row in given
    ]


def test_content_that_is_no_text_is_joined_or_rejected(prepared: Prepared) -> None:
    manifest = prepared("I14.jsonl")
    assert asked(manifest) == {"c1": "part onepart two", "c5": "barestrings"}
    assert rejects(manifest) == {2: "unsupported_modality", 3: "bad_content", 4: "bad_content"}
    without = prepared("I14.jsonl", {"policies": {"unsupported_modality": "drop"}})
    assert asked(without)["c2"] == "what is this?"
    assert without.notes == {"modality_dropped": 1}


def test_empty_content_is_no_prompt(prepared: Prepared) -> None:
    manifest = prepared("I15.jsonl")
    expected = {1: "empty_prompt", 2: "empty_prompt", 3: "no_content", 4: "no_messages", 5: "no_content"}
    assert rejects(manifest) == expected
    assert by_id(manifest) == {"e6": [{"role": "system", "content": "policy"}, user("hi")]}
    dropping = prepared("I15.jsonl", {"policies": {"empty_content": "drop"}})
    assert by_id(dropping)["e3"] == [user("ok"), user("go on")]
    assert rejects(dropping) == {**{k: v for k, v in expected.items() if k != 3}, 5: "nothing_to_answer"}


def test_prompt_that_leaves_no_room_is_rejected_or_asked_for_less(prepared: Prepared, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"id": "w1", "prompt": "word " * 400}) + "\n" + json.dumps({"id": "w2", "prompt": "ok"})
    )
    longest = prepared(path).longest_prompt
    limits = {"context_tokens": longest + 300, "classes": {"short": {"max_new_tokens": 512}}}
    manifest = prepared(path, **limits)
    assert rejects(manifest) == {1: "too_long"}
    assert f"{longest} prompt tokens + 512" in next(iter(read_rejects(manifest))).detail

    shrunk = prepared(path, {"policies": {"too_long": "shrink"}}, **limits)
    assert [row.max_new_tokens for row in rows(shrunk)] == [300, None]
    assert shrunk.notes == {"too_long_shrunk": 1}
    assert shrunk.longest_request == longest + 300
    assert [row.prompt_hashes for row in rows(shrunk)] == [row.prompt_hashes for row in rows(prepared(path))]
    some = {"policies": {"too_long": "shrink", "shrink_to_at_least": 301}}
    assert rejects(prepared(path, some, **limits)) == {1: "too_long"}


def test_exact_duplicates_are_joined_and_near_ones_are_not(prepared: Prepared) -> None:
    manifest = prepared("I20_dups.jsonl")
    hashes = [row.prompt_hashes for row in rows(manifest)]
    assert hashes[0] == hashes[1]
    assert len({str(h) for h in hashes}) == 3
    assert manifest.notes == {"duplicate_joined": 1}
    assert rejects(prepared("I20_dups.jsonl", {"policies": {"duplicates": "reject"}})) == {2: "duplicate"}


def test_control_tokens_in_text_are_rejected_or_kept(prepared: Prepared) -> None:
    manifest = prepared("T07_injection.jsonl")  # this tokenizer has no <think> and no <s>
    assert list(by_id(manifest)) == ["inj2"]
    assert rejects(manifest) == {1: "control_token"}
    kept = prepared("T07_injection.jsonl", {"policies": {"control_tokens": "keep"}})
    assert (kept.prompts, kept.notes) == (2, {"control_tokens_kept": 1})


def files_of_people() -> Iterator[Path]:
    """What people have sent; there are none in a plain clone."""
    kinds = (".json", ".jsonl", ".gz")
    folders = (SHARED / "data", SHARED / "cases" / "inputs")
    files = itertools.chain(*(folder.glob("*.json*") for folder in folders if folder.is_dir()))
    return (path for path in sorted(files) if path.suffix in kinds)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared here")
def test_every_file_at_hand_ends_in_rows_rejects_or_one_clear_error(prepared: Prepared) -> None:
    for path in files_of_people():
        try:
            manifest = prepared(path)
        except ConfigError as error:
            assert str(path) in str(error)
            continue
        lines = {place for r in read_rejects(manifest) if (place := r.location)}
        made = rows(manifest)
        assert manifest.rows == len(lines) + len(made) == len(lines | {row.location for row in made}), path
        assert sum(manifest.rejected.values()) == len(lines)
        source = path.read_bytes()
        text = (gzip.decompress(source) if source[:2] == b"\x1f\x8b" else source).decode()
        for row in made:
            for message in itertools.chain(*row.turns):
                # Letter by letter as in the file.
                written = (json.dumps(message["content"], ensure_ascii=a)[1:-1] for a in (False, True))
                assert any(form in text for form in written) or path.name[:3] in CHANGED, path
