"""The end of a replica's watch, with a client that answers nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from promptmill.generation.checkup import CheckUp
from promptmill.generation.replica import Replica
from promptmill.generation.window import RequestSizes
from promptmill.serving.client import ConnectionRefused, Request
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.settings import SamplingSettings, ServerSettings

HARMLESS = Request([1], SamplingSettings(), 1)
OFF = CheckUp("life-1", lambda: asyncio.sleep(0, ""), "", 0.0)


class NobodyThere:
    async def load(self) -> None:
        raise ConnectionRefused("nobody there")

    async def complete(self, *_: Any, **__: Any) -> None:
        raise ConnectionRefused("nobody there")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("steps", range(8))
def test_watch_ends_although_a_stream_breaks_in_that_moment(steps: int) -> None:
    """In Python 3.11, wait_for drops a cancellation that comes with what it waits for."""

    async def end() -> None:
        server = Server("life-1", "http://127.0.0.1:9", "")
        replica = Replica(server, NobodyThere(), Facts("m"), ServerSettings(), HARMLESS, RequestSizes(), OFF)
        watching = asyncio.create_task(replica.watch())
        await asyncio.sleep(0.01)
        replica.close()
        for _ in range(steps):
            await asyncio.sleep(0)
        broken = asyncio.create_task(replica.turns_out_dead())
        async with asyncio.timeout(60):
            assert await watching is None
            assert await broken

    asyncio.run(end())
