"""As many requests in flight as the window says: no client has a limit of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from promptmill.serving.chat_client import ChatClient
from promptmill.serving.client import Client, Request
from promptmill.serving.openai_client import CompletionsClient
from promptmill.serving.sglang_client import SGLangClient
from promptmill.settings import SamplingSettings

AT_ONCE = 300
"""More than the 100 connections that aiohttp and httpx allow by default."""
WAIT_S = 120.0
CLIENTS: dict[str, Callable[[str], Client]] = {
    "sglang": lambda url: SGLangClient(url, "", 100, 32, WAIT_S),
    "completions": lambda url: CompletionsClient(url, "", "m"),
    "chat": lambda url: ChatClient(url, "", "m", {}),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_request_reaches_the_server_at_once(kind: str) -> None:
    async def run() -> None:
        waiting = 0
        everybody = asyncio.Event()

        async def hold(request: web.Request) -> web.StreamResponse:
            nonlocal waiting
            waiting += 1
            if waiting == AT_ONCE:
                everybody.set()
            await everybody.wait()
            return web.json_response({"error": {"message": "that is all"}}, status=400)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hold)
        async with TestServer(app) as server:
            client = CLIENTS[kind](str(server.make_url("")).rstrip("/"))
            request = Request([1, 2], SamplingSettings(), 8, messages=[{"role": "user", "content": "hi"}])
            asked: list[Any] = [client.complete(request) for _ in range(AT_ONCE)]
            async with asyncio.timeout(WAIT_S):
                ends = await asyncio.gather(*asked, return_exceptions=True)
            await client.close()
        assert waiting == AT_ONCE
        assert {type(end).__name__ for end in ends} == {"PromptRejected"}

    asyncio.run(run())
