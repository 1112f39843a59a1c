"""The mill against a server that misbehaves on request, over real HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from promptmill.errors import PromptmillError, ServerDied, ServerError
from promptmill.generation.asking import MAX_EXCUSED, MAX_TRIES
from promptmill.generation.loop import HOPELESS
from promptmill.generation.mill import Finished, Lost, Mill
from promptmill.model import Model
from promptmill.profile import load_profile
from promptmill.prompts.manifest import Preparation, prepare, read_keys
from promptmill.serving.facts import Facts
from promptmill.serving.gate import CANARY
from promptmill.serving.liveness import Loss
from promptmill.serving.server import Server
from promptmill.store.journal import JournalReader, Piece
from promptmill.store.segments import Segments
from promptmill.store.store import Store
from promptmill.types import Answer, Manifest, Tally
from tests.helpers_store import cut, until

WAIT_S = 120.0
"""Ends what hangs."""
Script = Callable[[int, list[int]], "str | int"]
"""(times that this prompt was asked before, its ids) → "ok", "empty", "sick", "cut", "hang" or a status."""
PROFILE = """
model = "tiny"
[server]
engine = "openai"
urls = ["http://127.0.0.1:1"]
inactivity_timeout_s = 120.0
[chat]
reasoning_open = ""
reasoning_close = ""
[store]
url = "{folder}/store"
[[partitions]]
name = "A"
source = "{folder}/a.jsonl"
[[partitions]]
name = "B"
source = "{folder}/b.jsonl"
"""


class Letters:
    """Renders a conversation as the code points of its text: enough of a ChatRenderer for the mill."""

    end_ids = frozenset[int]()
    marker_texts = ("", "")

    def control_tokens(self) -> list[str]:
        return []

    def is_opened(self, prompt_ids: object) -> bool:
        return False

    def render(self, messages: list[dict[str, Any]], tools: object) -> list[int]:
        return [ord(c) for c in "".join(m["role"][0] + m["content"] for m in messages)]

    def render_many(self, prompts: list[tuple[list[dict[str, Any]], object]]) -> list[list[int]]:
        return [self.render(*prompt) for prompt in prompts]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def split(self, prompt_ids: object, output_ids: list[int]) -> Any:
        from promptmill.splitting import Split

        return Split("", "".join(map(chr, output_ids)).strip(), 0, [])

    def fingerprint(self) -> str:
        return "letters"


@dataclass
class Rogue:
    """A completions server in a thread of its own."""

    script: Script = lambda times, ids: "ok"
    asked: Counter[str] = field(default_factory=Counter)
    went_on: Counter[str] = field(default_factory=Counter)
    """Of these, how often with the first token of the answer, to go on from there."""
    url: str = ""
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        chat = "messages" in body
        ids = Letters().render(body["messages"], None) if chat else body["prompt"]
        text = "".join(map(chr, ids))
        goes_on = text.endswith("O")
        text = text.removesuffix("O")
        self.asked[text] += 1
        self.went_on[text] += goes_on
        order = self.script(self.asked[text] - 1, ids)
        if isinstance(order, int):
            return web.json_response({"error": {"message": f"said {order}"}}, status=order)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for token, reason in ((79, None), (107, "stop"))[goes_on:]:
            if token == 107 and order == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if token == 107 and order == "hang":
                await self.over.wait()
            token = 32 if order == "empty" else token
            token = 33 if order == "sick" else token
            choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
            choice |= (
                {"delta": {"content": chr(token)}} if chat else {"text": chr(token), "token_ids": [token]}
            )
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@contextmanager
def serving(server: Rogue) -> Iterator[Rogue]:
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await server.over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    yield server
    loop.call_soon_threadsafe(server.over.set)
    thread.join(WAIT_S)
    loop.close()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    with serving(Rogue()) as server:
        yield server


@dataclass
class Bench:
    """A store, prepared partitions and a mill on them."""

    folder: Path
    store: Store
    mill: Mill
    manifests: dict[str, Manifest]
    closed: bool = False

    def attach(self, rogue: Rogue, slots: int = 4, canary: str = "") -> None:
        facts = Facts("tiny", slots=slots, canary=canary)
        self.mill.attach(Server("rogue", rogue.url, ""), facts)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.mill.close()
            self.store.close()

    def answers(self, partition: str) -> list[Answer]:
        keys = [
            key for samples in read_keys(self.manifests[partition]) for hashes in samples for key in hashes
        ]
        return list(self.store.lookup(keys).values())

    def generate(self) -> dict[str, Tally | BaseException]:
        """What every partition's `generate` gave, all asked at once."""
        results: dict[str, Tally | BaseException] = {}

        def ask(name: str) -> None:
            try:
                results[name] = self.mill.generate(name)
            except PromptmillError as error:
                results[name] = error

        threads = [threading.Thread(target=ask, args=(name,)) for name in self.manifests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "generate hangs"
        return results


Make = Callable[..., Bench]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("promptmill.store.journal._PAUSE_S", 0.005)
    opened: list[Bench] = []

    def build(a: list[Any], b: list[Any], settings: Sequence[str] = (), **kwargs: Any) -> Bench:
        for name, rows in (("a", a), ("b", b)):
            lines = [json.dumps({"turns": row} if isinstance(row, list) else {"prompt": row}) for row in rows]
            (tmp_path / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        (tmp_path / "p.toml").write_text(PROFILE.format(folder=tmp_path), encoding="utf-8")
        profile = load_profile(str(tmp_path / "p.toml"), settings, environ={})
        store = Store(profile)
        store.open("test")
        model, renderer = Model("tiny", "1", "tiny"), Letters()
        manifests = {
            part.name: prepare(
                Preparation(profile, part, model, renderer, store.manifests, None, None)  # type: ignore[arg-type]
            )
            for part in profile.partitions
        }
        mill = Mill(profile, store, renderer, model, list(manifests.values()), **kwargs)  # type: ignore[arg-type]
        mill.start()
        bench = Bench(tmp_path, store, mill, manifests)
        opened.append(bench)
        return bench

    yield build
    for bench in opened:
        bench.close()


def counts(result: Tally | BaseException) -> dict[str, int]:
    assert isinstance(result, Tally), result
    return {name: n for name, n in result.to_json().items() if n}


def test_mill_leaves_the_collector_as_it_was(make: Make, rogue: Rogue) -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    bench = make(["one"], ["two"])
    assert gc.get_threshold()[0] > before[0][0]
    bench.close()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_mill_answers_each_prompt_once_and_duplicates_with_it(make: Make, rogue: Rogue) -> None:
    bench = make(["one", "two", "one"], ["two", "three"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 3, "answered": 3}
    assert counts(results["B"]) == {"rows": 2, "answered": 2}
    assert rogue.asked == {"uone": 1, "utwo": 1, "uthree": 1}
    assert isinstance(bench.mill.wait(WAIT_S), Finished)


def test_mill_asks_conversations_that_part_ways_after_the_same_first_turn(make: Make, rogue: Rogue) -> None:
    bench = make([["hello", "left"], ["hello", "right"]], [["hello", "left"]])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 2, "answered": 2}
    assert counts(results["B"]) == {"rows": 1, "answered": 1}
    assert rogue.asked == {"uhello": 1, "uhelloaOkuleft": 1, "uhelloaOkuright": 1}


def test_next_turn_goes_to_the_server_that_has_the_conversation_in_its_cache(
    make: Make, rogue: Rogue
) -> None:
    bench = make([[f"first {n}", "then", "last"] for n in range(20)], [])
    with serving(Rogue()) as other:
        bench.attach(rogue)
        bench.attach(other)
        assert counts(bench.generate()["A"]) == {"rows": 20, "answered": 20}
        for server in (rogue, other):
            first = {text for text in server.asked if "then" not in text}
            assert len(first) > 2
            assert sum(server.asked.values()) == 3 * len(first)


def test_mill_goes_on_from_a_first_turn_that_another_row_had_answered(make: Make, rogue: Rogue) -> None:
    between = [[f"filler {n}", "more"] for n in range(8)]
    bench = make([["hello", "left"], *between, ["hello", "right"]], [])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 10, "answered": 10}
    assert rogue.asked["uhello"] == rogue.asked["uhelloaOkuright"] == 1


def test_mill_gives_a_broken_request_three_tries_and_no_more(make: Make, rogue: Rogue, fast: None) -> None:
    rogue.script = lambda times, ids: (
        "cut" if ids[1] == ord("x") or (ids[1] == ord("y") and times < 2) else "ok"
    )
    bench = make(["x", "y", "z"], ["w"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 3, "answered": 2, "failed": 1}
    asked = {text: times for text, times in rogue.asked.items() if len(text) == 2}  # without the canary
    assert asked == {"ux": 3, "uy": 3, "uz": 1, "uw": 1}
    assert rogue.went_on["ux"] == rogue.went_on["uy"] == 2


QUESTION = "u" + CANARY[0]["content"]


def test_answers_of_a_sick_server_are_asked_again(make: Make, rogue: Rogue) -> None:
    """It answers, with status 200 and garbage: what it gave since its last good check-up is none."""
    rogue.script = lambda times, ids: "ok" if ids[1] == ord("x") else "sick"
    bench = make(["x1", "y1", "y2"], [["x3", "next"]])
    bench.attach(rogue, canary="Ok")
    results = bench.generate()
    lost = bench.mill.wait(WAIT_S)
    assert isinstance(lost, Lost)
    assert lost.loss == Loss("sick", "it answers '!!' where it answered 'Ok'")
    assert lost.answers == 0
    assert all(isinstance(result, ServerDied) for result in results.values())
    assert rogue.asked[QUESTION] == 2
    assert bench.answers("A") == bench.answers("B") == []
    with serving(Rogue()) as healthy:
        bench.attach(healthy, canary="Ok")
        results = bench.generate()
        assert counts(results["A"]) == {"rows": 3, "answered": 3}
        assert counts(results["B"]) == {"rows": 1, "answered": 1}
        assert healthy.asked[QUESTION] >= 1
    assert {a.content for a in [*bench.answers("A"), *bench.answers("B")]} == {"Ok"}


def test_server_that_comes_back_sick_is_not_its_own_measure(make: Make, rogue: Rogue) -> None:
    """Somebody else's is taken again as it is, and what it answers at the gate by then is garbage."""
    rogue.script = lambda times, ids: "sick"
    bench = make(["x1"], ["y1"])
    for canary in ("Ok", "!!"):
        bench.attach(rogue, canary=canary)
        assert all(isinstance(result, ServerDied) for result in bench.generate().values())
        lost = bench.mill.wait(WAIT_S)
        assert isinstance(lost, Lost)
        assert (lost.loss.signature, lost.answers) == ("sick", 0)


def test_partition_is_not_over_while_its_answers_are_withdrawn(
    make: Make, rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers would be sealed, where nothing can withdraw them, and be counted as its last ones."""
    rogue.script = lambda times, ids: "sick"
    bench = make(["x1"], ["y1"])
    withdraw = bench.store.withdraw

    def at_a_bad_moment(hashes: Sequence[str]) -> Any:
        bench.mill._loop._settle()
        return withdraw(hashes)

    monkeypatch.setattr(bench.store, "withdraw", at_a_bad_moment)
    bench.attach(rogue, canary="Ok")
    assert all(isinstance(result, ServerDied) for result in bench.generate().values())
    assert Segments(bench.store.folder).names() == []


def test_tokens_of_a_sick_server_are_not_gone_on_from(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: {ord("h"): "hang", ord("x"): "ok"}.get(ids[1], "sick")
    bench = make(["h"], ["x"], ["server.inactivity_timeout_s=60"])
    bench.attach(rogue, canary="Ok")
    assert all(isinstance(result, ServerDied) for result in bench.generate().values())
    with serving(Rogue()) as healthy:
        bench.attach(healthy, canary="Ok")
        assert counts(bench.generate()["A"]) == {"rows": 1, "answered": 1}
        assert (healthy.asked["uh"], healthy.went_on["uh"]) == (1, 0)


def test_turn_behind_a_withdrawn_answer_is_not_recorded(make: Make, rogue: Rogue) -> None:
    """Another server may have been at it when the one that gave the answer was found sick."""
    bench = make([["x", "next"]], ["y"])
    (((first, second),),) = read_keys(bench.manifests["A"])

    def script(times: int, ids: list[int]) -> str:
        if len(ids) > len("ux"):
            bench.store.withdraw([first]).result(WAIT_S)
        return "ok"

    rogue.script = script
    bench.attach(rogue)
    assert counts(bench.generate()["A"]) == {"rows": 1, "pending": 1}
    assert (bench.store.known(first), bench.store.known(second)) == (None, None)


def test_turn_of_another_server_behind_a_withdrawn_answer_is_withdrawn_with_it(
    make: Make, rogue: Rogue
) -> None:
    """The one that gave the first answer is busy, then found sick; the other is well, and stays."""
    bench = make([["x", "next"]], ["y"])
    sick: list[Rogue] = []

    def script_of(server: Rogue) -> Script:
        def script(times: int, ids: list[int]) -> str:
            if ids == [*map(ord, "ux")] and not sick:
                sick.append(server)
                [replica] = [r for r in bench.mill._loop.replicas if r.server.url == server.url]
                replica.pause(600)
            return "sick" if ids == [*map(ord, QUESTION)] and sick == [server] else "ok"

        return script

    with serving(Rogue()) as other:
        for server in (rogue, other):
            server.script = script_of(server)
            bench.attach(server, canary="Ok")
        assert counts(bench.generate()["A"]) == {"rows": 1, "answered": 1}
        well = other if sick == [rogue] else rogue
        assert (sick[0].asked["ux"], well.asked["ux"], well.asked["uxaOkunext"]) == (1, 1, 2)


def test_good_check_up_lets_answers_leave_the_journal(make: Make, rogue: Rogue) -> None:
    bench = make(["x1", "x2"], ["x3"])
    bench.attach(rogue, canary="Ok")
    bench.generate()
    assert JournalReader(bench.store.journal_path).partitions() == {}
    assert rogue.asked[QUESTION] >= 1


@pytest.mark.parametrize(("temperature", "times"), [(1.0, 3), (0.0, 1)])
def test_empty_answer_is_asked_again_where_another_may_come(
    temperature: float, times: int, make: Make, rogue: Rogue
) -> None:
    rogue.script = lambda asked, ids: "empty" if ids[1] == ord("x") or asked < 2 else "ok"
    bench = make(["x", "y"], ["z"], [f"sampling.temperature={temperature}"])
    bench.attach(rogue)
    answered = {"answered": 1, "empty": 1} if temperature else {"empty": 2}
    assert counts(bench.generate()["A"]) == {"rows": 2, **answered}
    assert (rogue.asked["ux"], rogue.asked["uy"]) == (times, times)


def test_chat_answers_have_no_ids_and_start_over(make: Make, rogue: Rogue, fast: None) -> None:
    rogue.script = lambda times, ids: "cut" if times == 0 and ids == [*map(ord, "ux")] else "ok"
    bench = make([["x", "next"]], ["y"], ["server.api=chat"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == counts(results["B"]) == {"rows": 1, "answered": 1}
    assert {text: rogue.asked[text] for text in ("ux", "uxaOkunext", "uy")} == {
        "ux": 2,
        "uxaOkunext": 1,
        "uy": 1,
    }
    assert not any(rogue.went_on.values())
    for answer in [*bench.answers("A"), *bench.answers("B")]:
        assert (answer.content, answer.flags, answer.completion_tokens) == ("Ok", ["no_ids"], 2)
        assert answer.prompt_ids == answer.output_ids == []
        assert (answer.prompt_tokens > 0, answer.resumed_tokens) == (True, 0)


def test_tries_are_bounded_however_many_requests_break_at_once(make: Make, rogue: Rogue, fast: None) -> None:
    rogue.script = lambda times, ids: "cut" if ids[1] == ord("x") else "ok"
    bench = make([f"x{n}" for n in range(40)], ["z"])
    bench.attach(rogue, slots=60)
    assert counts(bench.generate()["A"]) == {"rows": 40, "failed": 40}
    tries = {times for text, times in rogue.asked.items() if text.startswith("ux")}
    assert tries <= set(range(MAX_TRIES, MAX_TRIES + MAX_EXCUSED + 1))


def test_partition_whose_prompts_all_fail_is_given_up_and_the_other_goes_on(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: 400 if ids[1] == ord("x") else "ok"
    bench = make([f"x{n}" for n in range(HOPELESS + 20)], [f"z{n}" for n in range(HOPELESS + 20)])
    bench.attach(rogue)
    results = bench.generate()
    assert isinstance(results["A"], ServerError)
    assert "prompts all failed, the last one with: refused_by_server: 400: said 400" in str(results["A"])
    assert "--retry-failed" in str(results["A"])
    assert sum(rogue.asked[f"ux{n}"] for n in range(HOPELESS + 20)) < HOPELESS + 10
    assert counts(results["B"]) == {"rows": HOPELESS + 20, "answered": HOPELESS + 20}
    assert isinstance(bench.mill.wait(WAIT_S), Finished)
    assert not bench.mill.needs_server()  # else one that died meanwhile is launched again, for nothing


def test_mill_waits_between_the_tries_of_a_prompt(
    make: Make, rogue: Rogue, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a burst of errors, of a second, uses them up."""
    monkeypatch.setattr("promptmill.generation.asking.RETRY_AFTER_S", (0.3, 0.6))
    asked_at: list[float] = []

    def script(times: int, ids: list[int]) -> int | str:
        if ids[1] != ord("x"):
            return "ok"
        asked_at.append(time.monotonic())
        return 500

    rogue.script = script
    bench = make(["x", "y"], ["z"])
    bench.attach(rogue)
    assert counts(bench.generate()["A"]) == {"rows": 2, "answered": 1, "failed": 1}
    first, second, third = asked_at
    assert second - first >= 0.3
    assert third - second >= 0.6


def test_mill_never_repeats_what_the_server_refuses(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: 400 if ids[1] == ord("x") else "ok"
    bench = make(["x", "y"], ["z"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 2, "answered": 1, "failed": 1}
    assert rogue.asked["ux"] == 1
    failed = bench.store.lookup(bench.store.with_flag("failed"))
    assert [answer.error for answer in failed.values()] == ["refused_by_server: 400: said 400"]


def test_mill_that_retries_failed_prompts_asks_each_once_a_run(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: 400
    bench = make(["x", "x"], ["x"], retry_failed=True)
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 2, "failed": 2}
    assert counts(results["B"]) == {"rows": 1, "failed": 1}
    assert rogue.asked == {"ux": 1}


def test_mill_backs_off_from_a_busy_server_without_using_up_tries(
    make: Make, rogue: Rogue, fast: None
) -> None:
    rogue.script = lambda times, ids: 503 if times < 4 and ids[1] == ord("x") else "ok"
    bench = make(["x"], ["y"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 1, "answered": 1}
    assert rogue.asked["ux"] == 5


def test_mill_does_not_let_prompts_pay_for_a_server_that_fails_all(
    make: Make, rogue: Rogue, fast: None
) -> None:
    rogue.script = lambda times, ids: 500 if times < 4 else "ok"
    bench = make(["x"], ["y"])
    bench.attach(rogue)
    results = bench.generate()
    assert counts(results["A"]) == {"rows": 1, "answered": 1}
    assert rogue.asked["ux"] == 5


def test_mill_stops_at_a_wrong_key(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: 401
    bench = make(["x", "y"], ["z"])
    bench.attach(rogue)
    results = bench.generate()
    assert all("401" in str(error) for error in results.values())
    assert bench.mill.failure is not None
    assert not bench.mill.needs_server()


def test_mill_loses_a_silent_server_and_goes_on_with_the_next(make: Make, rogue: Rogue) -> None:
    rogue.script = lambda times, ids: "hang" if times == 0 and ids[1] == ord("x") else "ok"
    bench = make(["x", "y"], ["z"], ["server.inactivity_timeout_s=3"])
    bench.attach(rogue)
    results = bench.generate()
    assert isinstance(results["A"], ServerDied)
    assert counts(results["B"]) == {"rows": 1, "answered": 1}
    lost = bench.mill.wait(WAIT_S)
    assert isinstance(lost, Lost)
    assert "no token for" in lost.loss.text
    assert bench.mill.needs_server()
    bench.attach(rogue)
    assert counts(bench.mill.generate("A")) == {"rows": 2, "answered": 2}
    assert rogue.asked == {"ux": 2, "uy": 1, "uz": 1}
    (answer,) = (a for a in bench.answers("A") if a.resumed_tokens)
    assert (answer.content, answer.output_ids, answer.resumed_tokens) == ("Ok", [79, 107], 1)


def test_next_run_goes_on_from_the_tokens_that_were_kept(
    make: Make, rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is gone in the middle of an answer: what was flushed is not asked for again."""
    monkeypatch.setattr("promptmill.generation.loop._FLUSH_S", 0.05)
    rogue.script = lambda times, ids: "hang" if times == 0 and ids[1] == ord("x") else "ok"
    first = make(["x"], ["z"])
    first.attach(rogue)
    waiting = threading.Thread(target=first.generate)
    waiting.start()
    until(lambda: first.store.partials("A"), WAIT_S, "a kept token")
    kept = first.store.partials("A")
    first.close()
    waiting.join(WAIT_S)
    second = make(["x"], ["z"])
    assert second.store.partials("A") == kept
    second.attach(rogue)
    assert counts(second.generate()["A"]) == {"rows": 1, "answered": 1}
    assert rogue.went_on["ux"] == 1
    (answer,) = second.answers("A")
    assert (answer.content, answer.resumed_tokens) == ("Ok", 1)
    until(lambda: not second.store.partials("A"), WAIT_S, "nothing kept of what is answered")


@pytest.mark.parametrize(
    ("settings", "cap"), [(['sampling.stop=["O"]'], 64), (["sampling.stop_token_ids=[79]"], 64), ([], 1)]
)
def test_kept_tokens_are_only_those_that_may_be_gone_on_from(
    settings: list[str], cap: int, make: Make, rogue: Rogue
) -> None:
    """Across a seam a server sees no stop text, and nothing follows an end token or a full cap."""
    bench = make(["x"], ["z"], settings=[*settings, f"classes.short.max_new_tokens={cap}"])
    (hashes,) = (hashes for samples in read_keys(bench.manifests["A"]) for hashes in samples)
    bench.store.put_partials([Piece(hashes[0], "A", 0, [79])]).result(WAIT_S)
    bench.attach(rogue)
    assert counts(bench.generate()["A"])["rows"] == 1
    assert (rogue.asked["ux"], rogue.went_on["ux"]) == (1, 0)


def test_failure_does_not_take_the_place_of_a_shorter_answer(make: Make, rogue: Rogue) -> None:
    bench = make(["x", "x"], ["z"])
    (hashes,) = {tuple(hashes) for samples in read_keys(bench.manifests["A"]) for hashes in samples}
    bench.store.put(cut(hashes[0], 8, partition="A")).result(WAIT_S)
    rogue.script = lambda times, ids: 400 if ids[1] == ord("x") else "ok"
    bench.attach(rogue)
    assert counts(bench.generate()["A"]) == {"rows": 2, "failed": 2}
    assert rogue.asked["ux"] == 1
    (answer,) = bench.answers("A")
    assert (answer.finish_reason, answer.max_new_tokens) == ("length", 8), "it is still there"


def test_prompt_refused_with_the_tokens_it_had_is_asked_without_them(
    make: Make, rogue: Rogue, fast: None
) -> None:
    def script(times: int, ids: list[int]) -> str | int:
        if ids[1] != ord("x"):
            return "ok"
        return 400 if ids[-1] == ord("O") else "cut" if times == 0 else "ok"

    rogue.script = script
    bench = make(["x"], ["z"])
    bench.attach(rogue)
    assert counts(bench.generate()["A"]) == {"rows": 1, "answered": 1}
    (answer,) = bench.answers("A")
    assert (answer.content, answer.resumed_tokens, rogue.asked["ux"]) == ("Ok", 0, 3)


def test_answer_that_cannot_be_continued_starts_over(make: Make, rogue: Rogue, fast: None) -> None:
    rogue.script = lambda times, ids: "cut" if times == 0 and ids[1] == ord("x") else "ok"
    bench = make(["x"], ["z"], settings=["sampling.frequency_penalty=0.5"])
    bench.attach(rogue)
    assert counts(bench.generate()["A"]) == {"rows": 1, "answered": 1}
    assert (rogue.asked["ux"], rogue.went_on["ux"]) == (2, 0)
    assert bench.store.partials("A") == {}


def test_mill_stopped_finishes_what_is_in_flight_and_leaves_the_rest_pending(
    make: Make, rogue: Rogue
) -> None:
    bench = make([f"p{n}" for n in range(30)], ["z"])
    rogue.script = lambda times, ids: bench.mill.stop("enough") or "ok"  # type: ignore[func-returns-value]
    bench.attach(rogue)
    results = bench.generate()
    done = counts(results["A"])
    assert done["rows"] == 30
    assert done["answered"] + done["pending"] == 30
    assert 1 <= done["answered"] < 30
    assert bench.mill.stopping == "enough"


def test_mill_closed_early_releases_everybody_who_waits(make: Make) -> None:
    bench = make(["x"], ["y"])
    results: list[object] = []

    def ask() -> None:
        try:
            bench.mill.generate("A")
        except PromptmillError as error:
            results.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    bench.mill.close()
    thread.join(WAIT_S)
    assert results == ["the run was ended"]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection is judged at once, not after seconds of waiting for a death."""
    monkeypatch.setattr("promptmill.generation.replica._DEATH_CONFIRMED_S", 0.05)
    monkeypatch.setattr("promptmill.generation.replica._BUSY_PAUSE_S", 0.05)
    monkeypatch.setattr("promptmill.generation.asking.RETRY_AFTER_S", (0.05, 0.05))
    monkeypatch.setattr("promptmill.generation.breaks.TOGETHER_S", 0.02)
