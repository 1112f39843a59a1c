"""The index of what is known: as a dictionary would have it, and small."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from promptmill.prompts.hashing import digest, digests
from promptmill.store.index import Index, Known, supersedes
from tests.helpers_store import sha

KINDS = [
    Known("answered", "stop", 64),
    Known("flagged", "stop", 64),
    Known("truncated", "length", 32),
    Known("truncated", "length", 64),
    Known("answered", "stop", 128),
    Known("failed", "", 64),
]
Events = list[tuple[str, Known]]
# Few prompts, so that most of them are learned several times.
ZEROS_AT_THE_END = ["0" * 64, *("ab" * n + "00" * (32 - n) for n in (1, 14, 15))]
HASHES = [*map(sha, "abcd"), *ZEROS_AT_THE_END, "f" * 64]
EVENTS = st.lists(st.tuples(st.sampled_from(HASHES), st.sampled_from(KINDS)))
STEPS = st.lists(st.tuples(st.booleans(), EVENTS), max_size=6)


def learn_many(index: Index, events: Events) -> None:
    hashes = pa.array([prompt_hash for prompt_hash, _ in events], pa.string())
    index.learn_many(digests(hashes), np.array([index.code(known) for _, known in events], np.uint32))


def as_a_dictionary(events: Events) -> dict[str, Known]:
    found: dict[str, Known] = {}
    for prompt_hash, known in events:
        if prompt_hash not in found or supersedes(known, found[prompt_hash]):
            found[prompt_hash] = known
    return found


@settings(deadline=None)
@given(STEPS, st.integers(1, 6))
def test_index_holds_what_a_dictionary_would(steps: list[tuple[bool, Events]], merge_at: int) -> None:
    index = Index(merge_at)
    for together, events in steps:
        if together:
            learn_many(index, events)
        else:
            for prompt_hash, known in events:
                index.learn(prompt_hash, known)
    expected = as_a_dictionary([event for _, events in steps for event in events])
    assert [index.get(h) for h in HASHES] == [expected.get(h) for h in HASHES]
    assert len(index) == len(expected)
    caps = index.look_up(digests(pa.array(HASHES)), lambda known: known.max_new_tokens, -1)
    assert caps.tolist() == [expected[h].max_new_tokens if h in expected else -1 for h in HASHES]
    again = Index.load(*index.dump())
    assert [again.get(h) for h in HASHES] == [expected.get(h) for h in HASHES]


@settings(deadline=None)
@given(EVENTS, EVENTS, EVENTS)
def test_index_comes_to_the_same_in_one_step_or_many(one: Events, two: Events, three: Events) -> None:
    whole, merged = Index(), Index()
    learn_many(whole, [*one, *two, *three])
    for events in (one, two, three):
        learn_many(merged, events)
    assert [whole.get(h) for h in HASHES] == [merged.get(h) for h in HASHES]


@pytest.mark.parametrize("old", KINDS)
@pytest.mark.parametrize("new", KINDS)
@pytest.mark.parametrize("together", [False, True])
def test_index_follows_the_rule_of_what_supersedes(new: Known, old: Known, together: bool) -> None:
    index = Index()
    learn_many(index, [(sha("a"), old)])
    if together:
        learn_many(index, [(sha("b"), old), (sha("a"), new)])
    else:
        index.learn(sha("a"), new)
    assert index.get(sha("a")) == (new if supersedes(new, old) else old)


@pytest.mark.parametrize("merge_at", [1, 100])
def test_index_forgets_what_is_no_answer(merge_at: int) -> None:
    index = Index(merge_at)
    for prompt_hash in HASHES:
        index.learn(prompt_hash, KINDS[0])
    index.forget([HASHES[0], HASHES[4], sha("nobody")])
    assert [index.get(h) is None for h in HASHES] == [n in (0, 4) for n in range(len(HASHES))]
    index.learn(HASHES[0], KINDS[2])
    assert index.get(HASHES[0]) == KINDS[2]


def test_index_takes_tens_of_bytes_a_prompt() -> None:
    index = Index(merge_at=1000)
    for i in range(3000):
        index.learn(sha(str(i)), KINDS[i % len(KINDS)])
    keys, codes, kinds = index.dump()
    assert (len(keys), len(kinds)) == (3000, len(KINDS))
    assert keys.nbytes + codes.nbytes == 20 * 3000
    assert not index._new


def test_index_is_asked_while_another_thread_learns() -> None:
    index, hashes = Index(merge_at=50), [sha(str(i)) for i in range(2000)]
    seen, missed = 0, []

    def learn() -> None:
        nonlocal seen
        for prompt_hash in hashes:
            index.learn(prompt_hash, KINDS[0])
            seen += 1

    learner = threading.Thread(target=learn)
    learner.start()
    while learner.is_alive():
        upto = seen
        missed += [h for h in hashes[max(0, upto - 60) : upto] if index.get(h) is None]
        found = index.look_up(digests(pa.array(hashes[:upto], pa.string())), lambda _: 1, 0)
        missed += [h for h, there in zip(hashes, found.tolist(), strict=False) if not there]
    learner.join()
    assert missed == []
    assert len(index) == len(hashes)


def test_digests_of_an_array_are_those_of_its_hashes() -> None:
    whole = pa.array(HASHES)
    for array in (whole, whole[2:5], whole[:0]):
        assert digests(array).tolist() == [digest(h).rstrip(b"\0") for h in array.to_pylist()]


@pytest.mark.parametrize("text", ["", "abc", "a" * 63, "a" * 65, "g" * 64, "A" * 64, None])
def test_digests_of_what_is_no_hash_are_refused(text: str | None) -> None:
    with pytest.raises(ValueError, match="hash"):
        digests(pa.array([sha("a"), text], pa.string()))
