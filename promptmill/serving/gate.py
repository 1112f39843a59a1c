"""The gate between a launched server and the first prompt.

In this order: the process lives · the port answers · it is our server · its facts · headroom, and the longest
request fits · it renders and tokenizes as we do · a real answer through our own template. Each refusal is a
LaunchFailed that names its cause and what to do.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx

from promptmill import events
from promptmill.chat import ChatRenderer
from promptmill.errors import LaunchFailed, PromptmillError
from promptmill.model import Model
from promptmill.serving import openai_gate, sglang_gate
from promptmill.serving.client import Request
from promptmill.serving.engines import make_client
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.serving.start import Start
from promptmill.settings import Profile, SamplingSettings
from promptmill.types import Completion, Message

CANARY: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
CANARY_TOKENS = 64
_KEY = "canary"
_HTTP_TIMEOUT_S = 30.0  # SGLang's /health takes up to 20 s to say no


def pass_gate(
    profile: Profile, server: Server, model: Model, renderer: ChatRenderer, longest_request_tokens: int
) -> Facts:
    """Wait until `server` is healthy, check it, and return its facts. Raises LaunchFailed."""
    start = Start(server, profile.server)
    try:
        with httpx.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            trust_env=False,  # a proxy has no business between us and our server
            timeout=_HTTP_TIMEOUT_S,
        ) as http:
            if profile.server.engine == "sglang":
                facts = sglang_gate.wait_until_ready(profile, server, http, start)
            else:
                facts = openai_gate.wait_until_ready(profile, server, http, start)
            _check_room(profile, facts, longest_request_tokens, start)
            if profile.server.engine == "sglang":
                sglang_gate.compare_rendering(profile, http, facts.served_model_name, renderer, start)
            elif profile.server.api == "completions":
                openai_gate.compare_rendering(http, CANARY, renderer, start)
    except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise start.refusal(f"it answered, and then not as a server does: {error!r}", False) from error
    canary = _canary(profile, server, model, renderer, facts.served_model_name, start)
    server.note_schedulers()
    return replace(facts, startup_s=round(start.elapsed_s, 2), canary=canary)


def canary(renderer: ChatRenderer, max_new_tokens: int, ebnf: str | None = None) -> Request:
    """A harmless question, answered greedily."""
    sampling = SamplingSettings(temperature=0.0, ebnf=ebnf)
    ids = renderer.render(CANARY, None)
    return Request(ids, sampling, max_new_tokens, key=_KEY, messages=CANARY)


def _check_room(profile: Profile, facts: Facts, longest: int, start: Start) -> None:
    wanted = profile.server.min_headroom_gib
    if facts.headroom_gib is not None and facts.headroom_gib < wanted:
        raise start.refusal(
            f"it leaves {facts.headroom_gib:.2f} GiB of GPU memory free, min_headroom_gib wants {wanted:g}; "
            "a long prefill would run out of memory. Lower mem-fraction-static, or min_headroom_gib",
            False,
            "low_headroom",
            {"headroom_gib": facts.headroom_gib, "wanted_gib": wanted},
        )
    if facts.kv_tokens is not None and longest > facts.kv_tokens:
        raise start.refusal(
            f"the longest request takes {longest} tokens, and its KV cache holds {facts.kv_tokens}; "
            "raise mem-fraction-static (or max-total-tokens), or lower max_new_tokens",
            False,
            "kv_too_small",
            {"kv_tokens": facts.kv_tokens, "wanted_tokens": longest},
        )
    if facts.context_tokens is not None and longest > facts.context_tokens:
        flag = "context-length" if profile.server.engine == "sglang" else "ctx-size"
        raise start.refusal(
            f"the longest request takes {longest} tokens, the server has room for {facts.context_tokens}; "
            f"raise {flag}, or lower max_new_tokens"
        )


def _canary(
    profile: Profile, server: Server, model: Model, renderer: ChatRenderer, name: str, start: Start
) -> str:
    """One real answer by the road that every prompt will take."""
    request = canary(renderer, CANARY_TOKENS, profile.sampling.ebnf)

    async def ask() -> Completion:
        client = make_client(profile, server, name, model, renderer)
        try:
            return await client.complete(request)
        finally:
            await client.close()

    # A server that hangs from the first request on is not waited for as long as one that loads.
    patience_s = min(start.remaining_s(), profile.server.startup_silence_timeout_s)
    try:
        completion = asyncio.run(asyncio.wait_for(ask(), patience_s))
    except TimeoutError:
        words = f"the first answer did not come within {patience_s:.0f} s"
        raise start.refusal(words, False, "no_start_progress") from None
    except LaunchFailed:
        raise
    except PromptmillError as error:
        raise start.refusal(f"the first answer failed: {error}", False) from None
    return _answer(completion, request.input_ids, renderer, start)


def _answer(completion: Completion, prompt_ids: list[int], renderer: ChatRenderer, start: Start) -> str:
    """The text of the first answer. Raises LaunchFailed where it is none."""
    prompt_tokens = len(prompt_ids)
    words = f"it counts {completion.prompt_tokens} prompt tokens where we count {prompt_tokens}"
    if texts := completion.texts:
        if completion.prompt_tokens not in (prompt_tokens, -1):
            events.tell(events.Notice(f"{words}: its chat template is not the one that we know"))
        if not texts.reasoning and not texts.content:
            raise start.refusal("its first answer has neither content nor reasoning")
        return text_of(completion, renderer)
    if completion.prompt_tokens != prompt_tokens:
        raise start.refusal(words)
    if not completion.output_ids:
        raise start.refusal(
            'it returns no token ids. If it cannot, ask it for chat completions: server.api = "chat"'
        )
    if renderer.is_opened(prompt_ids) and not renderer.split(prompt_ids, completion.output_ids).reasoning:
        events.tell(events.Notice("its first answer has no reasoning, although the template opens it"))
    return text_of(completion, renderer)


def text_of(completion: Completion, renderer: ChatRenderer) -> str:
    """Reasoning and answer, as one text."""
    if texts := completion.texts:
        return f"{texts.reasoning}\n{texts.content}".strip()
    return renderer.decode(completion.output_ids)
