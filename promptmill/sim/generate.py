"""POST /generate."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from aiohttp import web

from promptmill.sim import answers
from promptmill.sim.hub import Hub, State
from promptmill.sim.refusals import Refusal, gate_error, invalid_json, validation_error, value_error
from promptmill.sim.sampling import check_gate, check_shape, resolve
from promptmill.sim.text import Detokenizer

_LINE = 928
_DONE = b"data: [DONE]\n\n"


def json_answer(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def read_json(request: web.Request, endpoint: str, line: int) -> dict[str, Any]:
    """The body. Raises Refusal where it is no JSON object."""
    raw = await request.read()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid_json(
            endpoint, request.path, line, error.pos, error.msg.partition(": line")[0]
        ) from None
    if not isinstance(body, dict):
        wrong = {
            "type": "dict_type",
            "loc": ("body",),
            "msg": "Input should be a valid dictionary",
            "input": body,
        }
        raise validation_error(endpoint, request.path, line, [wrong])
    return body


async def generate(hub: Hub, request: web.Request) -> web.StreamResponse:
    body = await read_json(request, "generate_request", _LINE)
    check_shape(body)
    params = body.get("sampling_params") or {}
    if not hub.log.old:
        for entry in params if isinstance(params, list) else [params]:
            check_gate(entry)
        if body.get("max_thinking_tokens") is not None and not hub.args["enable_strict_thinking"]:
            raise gate_error("max_thinking_tokens requires --enable-strict-thinking")
    if body.get("stream"):
        return await _streamed(hub, request, body)
    states, batch = make_states(hub, body)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_whole(hub, state, body)) for state in states]
    results = [task.result() for task in tasks]
    for result in results:
        if isinstance(result, Refusal):
            raise result
    return json_answer(results if batch else results[0])


def make_states(hub: Hub, body: dict[str, Any]) -> tuple[list[State], bool]:
    """One state a prompt and sample, and whether the answer is a list. Raises Refusal."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is None and text is None:
        raise value_error("Either text, input_ids or input_embeds should be provided.")
    if ids is not None and not ids:
        raise value_error("input_ids cannot be empty.")
    batch = isinstance(text if ids is None else ids[0], list)
    given_prompts: Any = text if ids is None else ids
    prompts: list[Any] = given_prompts if batch else [given_prompts]
    given = body.get("sampling_params") or {}
    params = given if isinstance(given, list) else [given] * len(prompts)
    rids = body.get("rid")
    states = []
    for index, prompt in enumerate(prompts):
        sampling = resolve(params[index % len(params)] if params else {})
        prompt_ids = hub.files.encode(prompt) if isinstance(prompt, str) else prompt
        check_lengths(hub, prompt_ids, sampling)
        rid = rids[index] if isinstance(rids, list) else rids
        if batch and isinstance(rids, str):
            rid = f"{rids}_{index}"
        count = max(1, sampling["n"])
        states += [
            make_state(hub, prompt_ids, sampling, bool(body.get("stream")), rid if count == 1 else None, body)
            for _ in range(count)
        ]
    return states, batch or len(states) > 1


def make_state(
    hub: Hub, ids: list[int], sampling: dict[str, Any], stream: bool, rid: str | None, body: dict[str, Any]
) -> State:
    logprobs = None
    if body.get("return_logprob"):
        start = body.get("logprob_start_len")
        logprobs = (-1 if start is None else start, body.get("top_logprobs_num") or 0)
    return State(
        rid=rid or uuid.uuid4().hex,
        prompt_ids=ids,
        sampling=sampling,
        stream=stream,
        detokenizer=Detokenizer(hub.files, sampling["skip_special_tokens"]),
        logprobs=logprobs,
    )


def check_lengths(hub: Hub, ids: list[int], sampling: dict[str, Any]) -> None:
    """Raises Refusal for what cannot fit the context; the scheduler checks the KV capacity itself."""
    context, wanted = hub.ready["context"], sampling["max_new_tokens"]
    if hub.args["allow_auto_truncate"]:
        return
    if len(ids) >= context:
        raise value_error(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({context} tokens)."
        )
    if wanted < 1 << 30 and len(ids) + wanted > context:
        raise value_error(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
            f"requested a total of {len(ids) + wanted} tokens: {len(ids)} tokens from the input messages and "
            f"{wanted} tokens for the completion. Please reduce the number of tokens in the input messages "
            "or the completion to fit within the limit."
        )


def submit(hub: Hub, state: State) -> None:
    """Also those requests that kill the real scheduler."""
    crash = False
    if state.logprobs is not None:
        crash = state.logprobs[0] < -1 or state.logprobs[1] > hub.ready["vocab"]
    hub.poisoned(state.prompt_ids)
    hub.submit(state, crash)


async def _whole(hub: Hub, state: State, body: dict[str, Any]) -> dict[str, Any] | Refusal:
    try:
        submit(hub, state)
    except Refusal as refusal:
        return refusal
    await hub.finished(state)
    if refused := answers.refusal_of(state.finish):
        return refused
    meta = answers.meta_info(hub, state, len(state.output_ids), state.finish, first=False)
    result = answers.chunk(hub, state, answers.final_text(state), state.output_ids, meta)
    if body.get("return_prompt_token_ids"):
        result["prompt_token_ids"] = state.prompt_ids
    return result


async def chunks(hub: Hub, state: State, text: bool = True) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, cumulative or deltas as the server's flag says."""
    delta = hub.args["incremental_streaming_output"]
    sent_ids, sent_text, first = 0, "", True
    async with aclosing(hub.updates(state)) as updates:
        async for count, finish in updates:
            ids = state.output_ids[:count]
            whole = answers.final_text(state) if finish else state.detokenizer.text(ids) if text else ""
            meta = answers.meta_info(hub, state, count, finish, first)
            if delta:
                yield answers.chunk(hub, state, whole[len(sent_text) :], ids[sent_ids:], meta)
            else:
                yield answers.chunk(hub, state, whole, ids, meta)
            sent_ids, sent_text, first = count, whole, False


async def open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def end_stream(response: web.StreamResponse, refusal: Refusal | None = None) -> web.StreamResponse:
    """[DONE], after the error that a stream carries under its status 200."""
    if refusal is not None:
        error = {
            "message": refusal.message, "type": "invalid_request_error", "code": refusal.status,
            "retryable": False,
        }  # fmt: skip
        await response.write(b"data: " + orjson.dumps({"error": error}) + b"\n\n")
    await response.write(_DONE)
    await response.write_eof()
    return response


async def _streamed(hub: Hub, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    if hub.broken_answers:
        hub.broken_answers -= 1
        raise Refusal(500, {})
    response = await open_stream(request)
    try:
        states, batch = make_states(hub, body)
        for state in states:
            submit(hub, state)
    except Refusal as refusal:
        hub.log.error(f"[http_server] Error: {refusal.message}")
        return await end_stream(response, refusal)

    async def relay(index: int, state: State) -> None:
        async for content in chunks(hub, state):
            if body.get("return_prompt_token_ids"):
                content["prompt_token_ids"] = state.prompt_ids
            if batch:
                content["index"] = index
            await response.write(b"data: " + orjson.dumps(content) + b"\n\n")

    async with asyncio.TaskGroup() as group:
        for index, state in enumerate(states):
            group.create_task(relay(index, state))
    return await end_stream(response)
