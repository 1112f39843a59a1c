"""Chat completions: the client against the shapes that servers give."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from promptmill.errors import PromptRejected
from promptmill.serving.chat_client import ChatClient
from promptmill.serving.client import ConnectionBroke, Request
from promptmill.settings import SamplingSettings
from promptmill.types import Completion, Message

ASKED: list[Message] = [{"role": "user", "content": "2 + 2?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}


def event(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def ask(
    events: Sequence[dict[str, Any]], pieces: list[Any] | None = None, status: int = 200
) -> tuple[Completion, dict[str, Any]]:
    """What the client makes of these events, and the body that it sent."""
    bodies: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if status != 200:
            return web.json_response({"error": {"message": "no such sampling"}}, status=status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for one in [*events, None]:
            data = (
                "[DONE]" if one is None else json.dumps({"id": "1", "object": "chat.completion.chunk", **one})
            )
            await response.write(f"data: {data}\n\n".encode())
        return response

    async def run() -> Completion:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        async with TestServer(app) as server:
            client = ChatClient(str(server.make_url("")).rstrip("/"), "key", "m", {"thinking": True})
            try:
                sampling = SamplingSettings(temperature=0.5, top_k=5, seed=3)
                request = Request([1], sampling, 64, sample=2, messages=ASKED, tools=TOOLS)
                return await client.complete(request, (pieces if pieces is not None else []).append)
            finally:
                await client.close()

    return asyncio.run(run()), bodies[0]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_either_name(name: str) -> None:
    pieces: list[Any] = []
    events = [
        event({"role": "assistant", "content": ""}),
        event({name: "2 and "}),
        event({name: "2.", "content": None}),
        event({"content": "4"}),
        event({}, "stop"),
        {"choices": [], "usage": {**USAGE, "completion_tokens_details": {"reasoning_tokens": 5}}},
    ]
    completion, _ = ask(events, pieces)
    texts = completion.texts
    assert texts
    assert (texts.reasoning, texts.content, texts.tokens, texts.reasoning_tokens) == ("2 and 2.", "4", 7, 5)
    assert (completion.output_ids, completion.finish_reason, completion.prompt_tokens) == ([], "stop", 12)
    assert len(pieces) == 3, "a sign of life for every piece of text"


def test_request_carries_messages_tools_sampling_and_template_arguments() -> None:
    _, body = ask([event({"content": "4"}, "stop")])
    assert body["messages"] == ASKED
    assert body["tools"] == TOOLS
    assert body["chat_template_kwargs"] == {"thinking": True}
    assert {name: body[name] for name in ("temperature", "top_k", "seed", "max_tokens", "stream")} == {
        "temperature": 0.5,
        "top_k": 5,
        "seed": 5,
        "max_tokens": 64,
        "stream": True,
    }


def test_tokens_are_counted_by_pieces_where_the_server_counts_none() -> None:
    completion, _ = ask([event({"content": "4"}), event({"content": "!"}, "length")])
    assert completion.texts
    assert completion.texts.tokens == 2
    assert completion.prompt_tokens == -1
    assert completion.finish_reason == "length"


def test_calls_that_the_server_parsed_are_told() -> None:
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    completion, _ = ask([event({"tool_calls": [call]}), event({}, "tool_calls")])
    assert completion.texts
    assert completion.texts.has_calls
    assert completion.finish_reason == "stop"


def test_answer_without_a_finish_reason_is_none() -> None:
    with pytest.raises(ConnectionBroke, match="without a finish reason"):
        ask([event({"content": "4"})])


def test_refusal_is_the_rows_fault() -> None:
    with pytest.raises(PromptRejected, match="no such sampling"):
        ask([], status=400)
