"""/v1/completions, /v1/chat/completions, /tokenize, /detokenize."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
from aiohttp import web

from promptmill.sim import answers
from promptmill.sim.generate import (
    check_lengths,
    chunks,
    end_stream,
    json_answer,
    make_state,
    open_stream,
    read_json,
    submit,
)
from promptmill.sim.hub import Hub, State
from promptmill.sim.refusals import Refusal, missing_field, value_error
from promptmill.sim.sampling import FIELDS, resolve

_CHAT = ("openai_v1_chat_completions", 1870)
_COMPLETIONS = ("openai_v1_completions", 1842)


async def chat(hub: Hub, request: web.Request) -> web.StreamResponse:
    body = await read_json(request, *_CHAT)
    if "messages" not in body:
        raise missing_field(_CHAT[0], request.path, _CHAT[1], "messages", body | {"tool_choice": "none"})
    kwargs = (hub.args["default_chat_template_kwargs"] or {}) if not isinstance(
        hub.args["default_chat_template_kwargs"], str
    ) else orjson.loads(hub.args["default_chat_template_kwargs"])  # fmt: skip
    kwargs = kwargs | (body.get("chat_template_kwargs") or {})
    tools = [_shown_tool(tool) for tool in body["tools"]] if body.get("tools") else None
    try:
        ids = await asyncio.to_thread(hub.files.render, body["messages"], tools, kwargs)
    except ValueError as error:
        raise value_error(str(error)) from None
    return await _answer(hub, request, body, ids, chat=True)


async def completions(hub: Hub, request: web.Request) -> web.StreamResponse:
    body = await read_json(request, *_COMPLETIONS)
    if "prompt" not in body:
        raise missing_field(_COMPLETIONS[0], request.path, _COMPLETIONS[1], "prompt", body)
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    ids = hub.files.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return await _answer(hub, request, body, ids, chat=False)


async def tokenize(hub: Hub, request: web.Request) -> web.StreamResponse:
    body = await read_json(request, "openai_v1_tokenize", 1900)
    ids = hub.files.encode(body.get("prompt") or "", special=body.get("add_special_tokens", True))
    return json_answer({"tokens": ids, "count": len(ids), "max_model_len": hub.ready["context"]})


async def detokenize(hub: Hub, request: web.Request) -> web.StreamResponse:
    body = await read_json(request, "openai_v1_detokenize", 1910)
    skip = body.get("skip_special_tokens", True)
    return json_answer({"text": hub.files.decode(body.get("tokens") or [], skip)})


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as 0.5.23 hands it to the template: nulls added, the function's own order kept."""
    function = tool.get("function") or {}
    return {
        "type": tool.get("type", "function"),
        "function": function if "description" in function else {"description": None, **function},
        "defer_loading": None,
    }


def _sampling(hub: Hub, body: dict[str, Any], chat: bool) -> dict[str, Any]:
    params = {key: body[key] for key in FIELDS if body.get(key) is not None and key != "max_new_tokens"}
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    params["max_new_tokens"] = limit if limit is not None or chat else 16
    params["min_new_tokens"] = body.get("min_tokens") or 0
    params["sampling_seed"] = body.get("seed")
    return resolve(params)


async def _answer(
    hub: Hub, request: web.Request, body: dict[str, Any], ids: list[int], chat: bool
) -> web.StreamResponse:
    sampling = _sampling(hub, body, chat)
    if not ids:
        raise value_error("input_ids cannot be empty.")
    check_lengths(hub, ids, sampling)
    state = make_state(hub, ids, sampling, bool(body.get("stream")), body.get("rid"), {})
    if body.get("stream"):
        return await _streamed(hub, request, body, state, chat)
    submit(hub, state)
    await hub.finished(state)
    if refused := answers.refusal_of(state.finish):
        raise refused
    text = answers.final_text(state)
    choice: dict[str, Any] = {"index": 0}
    if chat:
        reasoning, content = _split(hub, body, text)
        choice["message"] = {"role": "assistant", "content": content, "reasoning_content": reasoning}
    else:
        choice["text"] = text
    choice |= {"logprobs": None, **_ending(state.finish)}
    if body.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = state.prompt_ids
    if body.get("return_token_ids"):
        choice["response_token_ids"] = state.output_ids
    versions = [{"version": "default", "start": 0, "end": len(state.output_ids)}]
    head = _head(body, state, "chat.completion" if chat else "text_completion")
    metadata = {"weight_version": "default", "weight_versions": versions}
    return json_answer(head | {"choices": [choice], "usage": _usage(state), "metadata": metadata})


async def _streamed(
    hub: Hub, request: web.Request, body: dict[str, Any], state: State, chat: bool
) -> web.StreamResponse:
    response = await open_stream(request)
    head = _head(body, state, "chat.completion.chunk" if chat else "text_completion")
    going_on = {"finish_reason": None, "matched_stop": None}

    async def send(delta: dict[str, Any] | None, ending: dict[str, Any], **more: Any) -> None:
        choices = [] if delta is None else [{"index": 0, **delta, "logprobs": None, **ending}]
        await response.write(b"data: " + orjson.dumps(head | {"choices": choices, **more}) + b"\n\n")

    def piece(text: str | None, **first: str) -> dict[str, Any]:
        if not chat:
            return {"text": text or ""}
        delta: dict[str, Any] = {"reasoning_content": None, **first}
        return {"delta": delta if text is None else delta | {"content": text}}

    try:
        submit(hub, state)
    except Refusal as refusal:
        return await end_stream(response, refusal)
    if chat:
        await send(piece("", role="assistant"), going_on)
    sent, finish = 0, None
    async for content in chunks(hub, state):
        delta = content["text"]
        if not hub.args["incremental_streaming_output"]:
            sent, delta = len(delta), delta[sent:]
        finish = content["meta_info"]["finish_reason"]
        if delta:
            await send(piece(delta), going_on)
    await send(piece(None), _ending(finish))
    if (body.get("stream_options") or {}).get("include_usage"):
        await send(None, {}, usage=_usage(state))
    return await end_stream(response)


def _split(hub: Hub, body: dict[str, Any], text: str) -> tuple[str | None, str]:
    """Reasoning and content, as a --reasoning-parser takes them apart."""
    if not hub.args["reasoning_parser"] or body.get("separate_reasoning") is False:
        return None, text
    reasoning, mark, content = text.partition("</think>")
    if not mark:
        return (None, text) if "<think>" not in text else (text.removeprefix("<think>"), "")
    return reasoning.removeprefix("<think>").strip() or None, content.lstrip("\n")


def _head(body: dict[str, Any], state: State, kind: str) -> dict[str, Any]:
    return {
        "id": state.rid,
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or "default",
    }


def _ending(finish: dict[str, Any] | None) -> dict[str, Any]:
    finish = finish or {}
    return {"finish_reason": finish.get("type"), "matched_stop": finish.get("matched")}


def _usage(state: State) -> dict[str, Any]:
    return {
        "prompt_tokens": len(state.prompt_ids),
        "total_tokens": len(state.prompt_ids) + len(state.output_ids),
        "completion_tokens": len(state.output_ids),
        "prompt_tokens_details": None,
        "reasoning_tokens": state.reasoning_tokens,
        "completion_tokens_details": None,
    }
