"""Answers that are read as they are asked for: the winning one, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path

import pytest

from promptmill.store.segments import Segments
from promptmill.store.store import Store
from promptmill.types import Answer
from tests.helpers_store import answer, failed, make_profile, sha


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(make_profile(tmp_path))
    opened.open("test")
    yield opened
    opened.close()


def put(store: Store, *answers: Answer) -> None:
    for given in answers:
        store.put(given).result(20)


def test_answers_open_only_the_segments_that_hold_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(5):
        put(store, *(answer(sha(f"{n}-{i}")) for i in range(10)))
        store.seal_all()
    opened: list[str] = []
    lookup = Segments.lookup

    def lookup_seen(self: Segments, hashes: Set[str], names: Iterable[str]) -> Iterator[Answer]:
        opened.extend(names)
        return lookup(self, hashes, names)

    monkeypatch.setattr(Segments, "lookup", lookup_seen)
    answers = store.answers()
    assert store.lookup([sha("3-1"), sha("3-2"), sha("none")], answers).keys() == {sha("3-1"), sha("3-2")}
    assert len(opened) == 1
    assert store.lookup([sha("0-0"), sha("4-9")], answers).keys() == {sha("0-0"), sha("4-9")}
    assert len(opened) == 3


def test_answers_that_stand_in_several_segments_are_the_winning_ones(store: Store) -> None:
    put(store, failed(sha("a")), answer(sha("b"), content="first"))
    store.seal_all()
    put(store, answer(sha("a"), content="at last"))
    store.seal_all()
    Segments(store.folder).write("P", [answer(sha("b"), content="of another host")])
    found = store.lookup([sha("a"), sha("b")], store.answers())
    assert {h: a.content for h, a in found.items()} == {sha("a"): "at last", sha("b"): "first"}


def test_answers_follow_what_is_sealed_after_they_were_located(store: Store) -> None:
    put(store, answer(sha("a")))
    store.seal_all()
    put(store, answer(sha("b")))
    answers = store.answers()
    both = [sha("a"), sha("b")]
    assert len(store.lookup(both, answers)) == 2
    store.seal_all()
    assert len(store.lookup(both, answers)) == 2
    put(store, answer(sha("c")))
    store.seal_all()
    assert len(store.lookup([*both, sha("c")], answers)) == 3
