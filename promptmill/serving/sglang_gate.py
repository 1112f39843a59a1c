"""What the gate asks of SGLang, in the shapes of 0.5.9 and 0.5.23.

Only named fields are read and kept: /server_info holds the key, three times.
"""

from __future__ import annotations

import re
from typing import Any

import httpx

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import PromptRejected
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.serving.sglang_flags import KEPT_FREE
from promptmill.serving.start import Start
from promptmill.settings import Profile
from promptmill.types import Message

_NULL_MEMBER = re.compile(r',\s*"[^"]+":\s*null|"[^"]+":\s*null\s*,\s*')
_PLAIN: list[Message] = [
    {"role": "system", "content": "You answer in one word."},
    # Digits, runs of spaces and signs outside ASCII: where tokenizers of one vocabulary part ways.
    {"role": "user", "content": "Which is larger, x =  12 or ²³ − 1?\n\tÄnder' nichts 🦊."},
]
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}},
                "required": ["city"],
            },
        },
    }
]


def wait_until_ready(profile: Profile, server: Server, http: httpx.Client, start: Start) -> Facts:
    """Port, identity, warm-up, facts. Raises LaunchFailed."""
    info: dict[str, Any] = {}

    def answers() -> bool:
        nonlocal info
        info = _model_info(http, start)
        return bool(info)

    start.wait_for(answers, "its port never answered")
    name = str(info.get("served_model_name", ""))
    wanted = server.name if server.process else profile.server.served_model_name
    if wanted and name != wanted:
        raise start.refusal(
            f"another server answers at {server.url}: it serves {name!r}, not {wanted!r}",
            True,
            "wrong_server",
        )
    start.wait_for(lambda: _is_healthy(http), "it never became healthy")
    return _facts(name, _server_info(http), _longest(http, name), start)


def compare_rendering(
    profile: Profile, http: httpx.Client, name: str, renderer: ChatRenderer, start: Start
) -> None:
    """Our ids against those of the server's own chat path, for a plain and for a tools prompt.

    Raises LaunchFailed with both texts where they differ, unless the profile accepts that.
    """
    for tools in (None, _TOOLS):
        try:
            ours = renderer.render(_PLAIN, tools)
        except PromptRejected as error:
            if tools is None:
                raise start.refusal(f"our own template refuses a plain prompt: {error}") from None
            continue  # rows with tools are rejected for the same reason, and never asked
        if difference := _difference(profile, http, name, renderer, ours, tools):
            if not profile.server.accept_rendering_difference:
                raise start.refusal(
                    f"{difference}\nGive both one template (chat.template, the model's files, the version "
                    "of transformers), or set server.accept_rendering_difference = true",
                    True,
                    "ids_differ",
                )
            events.tell(events.Notice(f"accepted: {difference}"))


def _difference(
    profile: Profile,
    http: httpx.Client,
    name: str,
    renderer: ChatRenderer,
    ours: list[int],
    tools: list[dict[str, Any]] | None,
) -> str:
    """How the server's rendering differs from ours; empty where it does not."""
    what = "a tools prompt" if tools else "a plain prompt"
    body: dict[str, Any] = {
        "model": name,
        "messages": _PLAIN,
        "max_tokens": 1,
        "temperature": 0,
        "return_prompt_token_ids": True,
    }
    if tools:
        body["tools"] = tools
    if profile.chat.template_kwargs:
        body["chat_template_kwargs"] = profile.chat.template_kwargs
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        return f"its chat path refuses {what}: {response.status_code} {response.text[:300]}"
    data = response.json()
    theirs = data["choices"][0].get("prompt_token_ids")
    if theirs is None:  # an older server; the count is all that it tells
        counted = data["usage"]["prompt_tokens"]
        return "" if counted == len(ours) else f"it renders {what} to {counted} tokens, we to {len(ours)}"
    if theirs == ours:
        return ""
    our_text, their_text = renderer.decode_all(ours), renderer.decode_all(theirs)
    if tools and _NULL_MEMBER.sub("", our_text) == _NULL_MEMBER.sub("", their_text):
        return ""  # its tools carry members that are null, and say nothing
    shown = f"  ours:   {our_text!r}\n  theirs: {their_text!r}"
    if our_text == their_text:
        shown += f"\n  ours:   {ours}\n  theirs: {theirs}"
    return f"its chat path renders {what} differently than we do.\n{shown}"


def _model_info(http: httpx.Client, start: Start) -> dict[str, Any]:
    """Empty while nothing answers. Raises LaunchFailed for what is no SGLang server, or not ours."""
    try:
        response = http.get("/model_info")
        if response.status_code == 404:
            response = http.get("/get_model_info")
    except httpx.TransportError:
        return {}
    if response.status_code in (401, 403):
        raise start.refusal(
            f"it answers {response.status_code}: another server, or a wrong key (server.api_key_env)",
            True,
            "wrong_server",
        )
    if response.status_code == 404:
        raise start.refusal("what answers there is no SGLang server (/model_info: 404)", True, "wrong_server")
    if response.status_code != 200:
        return {}
    data = response.json()
    return data if isinstance(data, dict) else {}


def _is_healthy(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def _server_info(http: httpx.Client) -> dict[str, Any]:
    response = http.get("/server_info")
    if response.status_code == 404:
        response = http.get("/get_server_info")
    data = response.json() if response.status_code == 200 else {}
    return data if isinstance(data, dict) else {}


def _longest(http: httpx.Client, name: str) -> int | None:
    """max_model_len of /v1/models: the context length in effect."""
    response = http.get("/v1/models")
    for card in response.json().get("data", []) if response.status_code == 200 else []:
        if card.get("id") == name and isinstance(card.get("max_model_len"), int):
            return int(card["max_model_len"])
    return None


def _facts(name: str, info: dict[str, Any], max_model_len: int | None, start: Start) -> Facts:
    start.follow()
    log = start.log.facts
    states = info.get("internal_states") or [{}]
    kv_tokens = info.get("max_total_num_tokens") or log.kv_tokens
    context = min((n for n in (max_model_len or log.context_tokens, kv_tokens) if n), default=None)
    dtype = log.kv_dtype if info.get("kv_cache_dtype") in (None, "auto") else info["kv_cache_dtype"]
    per_rank = states[0].get("effective_max_running_requests_per_dp")
    ranks = info.get("dp_size") or 1
    # With attention in data parallel, the ranks are the same GPUs as those in tensor parallel.
    copies = 1 if info.get("enable_dp_attention") else ranks
    return Facts(
        served_model_name=name,
        slots=per_rank * ranks if per_rank else log.max_running_requests,
        context_tokens=context - KEPT_FREE if context else None,
        kv_tokens=kv_tokens,
        capacity_tokens=kv_tokens * ranks if kv_tokens else None,
        gpus=info["tp_size"] * (info.get("pp_size") or 1) * copies if info.get("tp_size") else None,
        headroom_gib=log.headroom_gib,
        version=info.get("version"),
        kv_dtype=str(dtype).removeprefix("torch.") if dtype else None,
        mem_fraction_static=info.get("mem_fraction_static") or log.mem_fraction_static,
    )
