"""The simulator, misbehaving by a plan as nothing of it does by itself, with books of what it was asked.

    python -m tests.chaos.rogue FOLDER [flags of the simulator]

In FOLDER: `plan.json`, a Plan; `launches`, a line a life; `asked`, a line a request: when, its rid, its
prompt tokens; `generated`, the tokens that all lives decoded for prompts, be they sent or not: a shared page,
so that it outlives whoever is killed.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from promptmill.sim import scheduler, server
from promptmill.sim.hub import Hub

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HASH = 16
_LOOK_S = 0.01
_GIVE_UP_S = 5.0


@dataclass(frozen=True)
class Burst:
    """What becomes of the `start`-th request, over all lives, and of all others for `seconds` after it."""

    start: int
    seconds: float
    kind: str
    """A status; `abort:STATUS` (0 is none) or `error:STATUS`, both under a 200; `half`, an event that breaks
    off; `cut:N`, the connection once N tokens have come."""


@dataclass
class Plan:
    lives: list[list[str]] = field(default_factory=list)
    """Faults of the simulator, life by life; later lives have none."""
    always: list[str] = field(default_factory=list)
    """Those that every life has."""
    bursts: list[Burst] = field(default_factory=list)
    room: tuple[int, int] | None = None
    """After so many answers the run may make no file larger than its journal and so many bytes."""

    def write(self, folder: Path) -> None:
        (folder / "plan.json").write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        data = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        return cls(**{**data, "bursts": [Burst(**burst) for burst in data["bursts"]]})


@dataclass(frozen=True)
class Asked:
    at: float
    key: str
    """The first characters of the prompt's hash."""
    tokens: int


def asked(folder: Path) -> list[Asked]:
    """Every request for a prompt so far, in order."""
    try:
        lines = (folder / "asked").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    fields = [line.split() for line in lines]
    return [Asked(float(at), rid[:_HASH], int(tokens)) for at, rid, tokens in fields]


def generated(folder: Path) -> int:
    """Tokens that were decoded for prompts so far."""
    data = (folder / "generated").read_bytes() if (folder / "generated").exists() else bytes(8)
    return int(struct.unpack("Q", data[:8])[0])


def is_for_a_prompt(rid: str) -> bool:
    """Not for the gate, a warm-up, or to see whether the server answers."""
    return rid[_HASH : _HASH + 1] == "-" and not rid.startswith(("canary", "0" * _HASH))


def main() -> int:
    folder, *flags = sys.argv[1:]
    place = Path(folder)
    plan = Plan.read(place)
    with (place / "launches").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    life = len((place / "launches").read_text(encoding="utf-8").splitlines())
    faults = [*plan.always, *(plan.lives[life - 1] if life <= len(plan.lives) else [])]
    _count_tokens(place)
    _serve_by_plan(place, plan)
    return server.main([*flags, *(part for fault in faults for part in ("--sim-fault", fault))])


def _count_tokens(place: Path) -> None:
    handle = os.open(place / "generated", os.O_RDWR | os.O_CREAT)
    os.ftruncate(handle, mmap.PAGESIZE)
    page = mmap.mmap(handle, mmap.PAGESIZE)
    advance = scheduler._advance

    def counted(request: Any) -> Any:
        if is_for_a_prompt(request.rid):
            struct.pack_into("Q", page, 0, struct.unpack_from("Q", page)[0] + 1)
        return advance(request)

    scheduler._advance = counted


def _serve_by_plan(place: Path, plan: Plan) -> None:
    # Imported where it is needed as in server.py: the scheduler is forked without it.
    from promptmill.sim import app as app_

    make_app = app_.make_app

    def make_rogue(hub: Hub, startup_s: float) -> web.Application:
        app = make_app(hub, startup_s)
        app.middlewares.insert(0, _middleware(hub, plan, place))
        return app

    app_.make_app = make_rogue


def _middleware(hub: Hub, plan: Plan, place: Path) -> Any:
    book = os.open(place / "asked", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    number = (place / "asked").read_bytes().count(b"\n")
    began: dict[Burst, float] = {}
    cutting: set[asyncio.Task[None]] = set()

    @web.middleware
    async def misbehave(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal number
        if request.path != "/generate" or request.method != "POST":
            return await handler(request)
        body = orjson.loads(await request.read())
        rid = str(body.get("rid") or "")
        if not is_for_a_prompt(rid):
            return await handler(request)
        os.write(book, f"{time.monotonic()} {rid} {len(body['input_ids'])}\n".encode())
        number += 1
        now = time.monotonic()
        began.update({burst: now for burst in plan.bursts if burst.start == number})
        kind = next((burst.kind for burst, at in began.items() if now <= at + burst.seconds), "")
        if not kind:
            return await handler(request)
        name, _, value = kind.partition(":")
        if name == "cut":
            task = asyncio.create_task(_cut(hub, request, rid, int(value)))
            cutting.add(task)
            task.add_done_callback(cutting.discard)
            return await handler(request)
        if name.isdigit():
            return web.json_response({"error": {"message": "rogue"}}, status=int(name))
        return await _under_200(request, name, int(value or 0), len(body["input_ids"]), rid)

    return misbehave


async def _cut(hub: Hub, request: web.Request, rid: str, tokens: int) -> None:
    """Answers that end before it are left alone."""
    deadline = time.monotonic() + _GIVE_UP_S
    while time.monotonic() < deadline:
        state = hub.states.get(rid)
        if state is not None and len(state.output_ids) >= tokens and request.transport is not None:
            request.transport.abort()
            return
        await asyncio.sleep(_LOOK_S)


async def _under_200(
    request: web.Request, name: str, status: int, prompt_tokens: int, rid: str
) -> web.StreamResponse:
    finish = {"type": "abort", "message": "rogue", "status_code": status or None, "err_type": None}
    meta = {"id": rid, "finish_reason": finish, "prompt_tokens": prompt_tokens, "completion_tokens": 0}
    events = {
        "abort": orjson.dumps({"text": "", "output_ids": [], "meta_info": meta}),
        "error": orjson.dumps({"error": {"message": "rogue", "code": status}}),
        "half": b'{"text": "',
    }
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    await response.write(b"data: " + events[name] + b"\n\n")
    await response.write_eof()
    return response


if __name__ == "__main__":
    sys.exit(main())
