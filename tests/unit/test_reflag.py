"""Answers judged anew from their ids: what changes, what stays, and who follows it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import byte_tokenizer, make_answer, write_lines

from promptmill.chat import ChatRenderer
from promptmill.cli import main
from promptmill.errors import LockHeld, StoreError
from promptmill.model import load_tokenizer, resolve_model
from promptmill.prompts.manifest import Preparation, make_current, prepare, read_keys, read_prompts
from promptmill.reflag import reflag, rejudged
from promptmill.release.dataset import Release, publish
from promptmill.settings import Profile
from promptmill.store.store import Store
from promptmill.types import NO_IDS, Answer, Manifest, PromptRow

TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|><think>"
# What the model said to each prompt: whole, without an end to its reasoning, and closed twice.
SAID = (
    "Because.</think>Yes.<|end|>",
    "Because, and<|end|>",
    "a</think>b</think>c<|end|>",
    "x</think>y<|end|>",
)
PLAIN: dict[str, Any] = {"reasoning": "none"}


class Place:
    """A store whose answers were recorded as if the model had no reasoning."""

    def __init__(self, folder: Path) -> None:
        tokenizer = byte_tokenizer(
            TEMPLATE, ("<|end|>", "<|user|>", "<|assistant|>"), ("<think>", "</think>"), eos_token="<|end|>"
        )
        tokenizer.save_pretrained(folder / "model")
        write_lines(folder / "a.jsonl", [{"id": str(n), "prompt": f"Why {n}?"} for n in range(len(SAID))])
        self.folder = folder
        self.ids: Callable[[str], list[int]] = lambda text: list(tokenizer(text)["input_ids"])
        profile = self.profile(**PLAIN)
        model = resolve_model(profile)
        self.model = model
        self.renderer = ChatRenderer(load_tokenizer(profile, model, folder), profile.chat)
        self.manifest: Manifest = prepare(
            Preparation(
                profile, profile.partitions[0], model, self.renderer, Store(profile).manifests, None, None
            )
        )
        make_current(self.manifest, Store(profile).manifests)
        self.rows: list[PromptRow] = list(read_prompts(self.manifest))
        self.hashes = [chain[0] for (chain,) in read_keys(self.manifest)]

    def profile(self, **chat: Any) -> Profile:
        return Profile(
            model=str(self.folder / "model"),
            chat=chat,
            partitions=[{"name": "A", "source": str(self.folder / "a.jsonl")}],
            store={"url": str(self.folder / "store")},
            release={"url": str(self.folder / "release")},
        )

    def recorded(self, n: int, **changes: Any) -> Answer:
        ids = self.ids(SAID[n])
        values = {
            "prompt_ids": self.rows[n].input_ids,
            "output_ids": ids,
            "completion_tokens": len(ids),
            "created_at": f"2026-01-01T00:00:0{n}+00:00",
            **changes,
        }
        return rejudged(make_answer(self.hashes[n], **values), self.renderer)

    def read(self) -> Store:
        store = Store(self.profile())
        store.refresh()
        return store

    def standing(self) -> list[tuple[str, str, str, list[str]]]:
        found = self.read().lookup(self.hashes)
        answers = [found[h] for h in self.hashes if h in found]
        return [(a.status, a.reasoning, a.content, a.flags) for a in answers]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """The first two answers in a segment, the rest in the journal."""
    place = Place(tmp_path)
    store = Store(place.profile())
    store.open("test")
    for n in range(len(SAID)):
        store.put(place.recorded(n)).result()
        if n == 1:
            store.seal_all()
    store.close()
    yield place


JUDGED_ANEW = [
    ("answered", "Because.", "Yes.", []),
    ("empty", "Because, and", "", ["reasoning_never_closed"]),
    ("flagged", "a", "b</think>c", ["several_closes", "control_tokens"]),
    ("answered", "x", "y", []),
]


def test_answers_are_judged_anew_without_touching_them(place: Place) -> None:
    before = place.standing()
    assert [status for status, *_ in before] == ["answered"] * 4
    segments = {p: p.read_bytes() for p in (place.folder / "store" / "segments").rglob("*.parquet")}
    changes = reflag(place.profile())["A"]
    assert place.standing() == JUDGED_ANEW
    assert (changes.answers, changes.changed, changes.texts) == (4, 4, 4)
    assert changes.statuses == {"answered -> empty": 1, "answered -> flagged": 1}
    assert changes.gained == {"reasoning_never_closed": 1, "several_closes": 1, "control_tokens": 1}
    assert segments == {p: p.read_bytes() for p in (place.folder / "store" / "segments").rglob("*.parquet")}
    ids = {h: (a.prompt_ids, a.output_ids) for h, a in place.read().lookup(place.hashes).items()}
    assert ids == {
        h: (r.input_ids, place.ids(t)) for h, r, t in zip(place.hashes, place.rows, SAID, strict=True)
    }


def test_accounting_and_releases_follow(place: Place) -> None:
    def released() -> Release:
        tallies = [store.tally(place.manifest)]
        return publish(place.profile(), store, place.model, place.renderer, [place.manifest], tallies)

    store = place.read()
    assert released().rows == {"conversations": 4, "turns": 4}
    reflag(place.profile())
    store = place.read()
    assert +store.tally(place.manifest).counts == {"answered": 2, "empty": 1, "flagged": 1}
    second = released()
    assert (second.new, second.rows) == (True, {"conversations": 2, "turns": 4})
    assert "several_closes" in store.flags()
    assert store.with_flag("several_closes") == {place.hashes[2]}
    assert store.with_flag("empty") == {place.hashes[1]}
    assert store.with_flag("answered") == {place.hashes[0], place.hashes[3]}


def test_sealing_and_another_start_keep_the_judgement(place: Place) -> None:
    reflag(place.profile())
    store = Store(place.profile())
    store.open("test")
    store.seal_all()
    store.close()
    assert place.standing() == JUDGED_ANEW
    assert reflag(place.profile())["A"].changed == 0


def test_judging_as_at_first_takes_the_layer_away(place: Place) -> None:
    first = place.standing()
    prints = place.read().fingerprint
    reflag(place.profile())
    assert reflag(place.profile(**PLAIN))["A"].changed == 4
    assert place.standing() == first
    left = [p.name for p in (place.folder / "store" / "judgements").rglob("*") if p.is_file()]
    assert left == ["current.json"]
    assert place.read().fingerprint() == prints()


def test_dry_run_changes_nothing(place: Place) -> None:
    before = place.standing()
    assert reflag(place.profile(), dry_run=True)["A"].changed == 4
    assert place.standing() == before
    assert not (place.folder / "store" / "judgements").exists()


def test_answer_that_took_the_place_of_a_judged_one_stands_for_itself(place: Place) -> None:
    reflag(place.profile())
    store = Store(place.profile())
    store.open("test")
    cut = place.recorded(0, finish_reason="length", max_new_tokens=5000)
    failed = make_answer(place.hashes[1], status="failed", finish_reason="")
    store.put(replace(cut, prompt_hash="f" * 64)).result()
    store.put(failed).result()  # takes the place of no answer
    store.close()
    assert place.standing() == JUDGED_ANEW
    assert reflag(place.profile())["A"].changed == 1


def test_failures_and_answers_without_ids_are_as_they_are(place: Place) -> None:
    for answer in (
        make_answer(status="failed", finish_reason="", output_ids=[]),
        make_answer(flags=[NO_IDS], prompt_ids=[], output_ids=[]),
    ):
        assert rejudged(answer, place.renderer) == answer


def test_run_that_is_under_way_is_not_interfered_with(place: Place) -> None:
    store = Store(place.profile())
    store.open("a run")
    try:
        with pytest.raises(LockHeld, match="a run"):
            reflag(place.profile())
    finally:
        store.close()


def test_pointer_that_cannot_be_read_is_named(place: Place) -> None:
    reflag(place.profile())
    (place.folder / "store" / "judgements" / "current.json").write_text("{")
    with pytest.raises(StoreError, match=r"judgements/current\.json cannot be read"):
        place.read()


def test_command_says_what_changed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    path = place.folder / "p.toml"
    path.write_text(
        f"model = '{place.folder}/model'\n[store]\nurl = '{place.folder}/store'\n"
        f"[[partitions]]\nname = 'A'\nsource = '{place.folder}/a.jsonl'\n"
    )
    assert main(["reflag", str(path), "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["partitions"]["A"]
    assert (told["answers"], told["changed"]) == (4, 4)
    assert main(["reflag", str(path)]) == 0
    said = capsys.readouterr().out
    assert "A: 4 of 4 answers judged otherwise, 4 with other text" in said
    assert "1 status: answered -> empty" in said
