"""The gate between a launched server and the first prompt.

In this order: the process lives · the port answers · it is our server · its facts · the longest request fits
· it renders and tokenizes as we do · a real answer through our own template. Each refusal is a LaunchFailed
that names its cause and what to do.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from promptmill.chat import ChatRenderer
from promptmill.errors import LaunchFailed, PromptmillError
from promptmill.generation.client import OpenAIClient
from promptmill.serving.server import Server
from promptmill.settings import Profile, SamplingSettings
from promptmill.types import Message

_CANARY: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
_CANARY_TOKENS = 64
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Facts:
    """What a healthy server says of itself; None is what it does not tell."""

    served_model_name: str
    slots: int | None
    """Requests that it works on at a time."""
    context_tokens: int | None
    """Room for one prompt and its answer."""
    kv_tokens: int | None
    version: str | None
    kv_dtype: str | None
    startup_s: float
    canary: str
    """What it answered at the gate."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the prompts ask of a server."""

    longest_request_tokens: int
    """Longest prompt and its cap."""


def pass_gate(profile: Profile, server: Server, renderer: ChatRenderer, needs: Needs) -> Facts:
    """Wait until `server` is healthy, check it, and return its facts. Raises LaunchFailed."""
    started = time.monotonic()
    gate = _Gate(server, deadline=started + profile.server.startup_timeout_s)
    try:
        with httpx.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            trust_env=False,  # a proxy has no business between us and our server
            timeout=10,
        ) as http:
            gate.wait_for(lambda: _answers(http), "its port never answered")
            name = _identify(profile, server, http, gate)
            props = _props(http)
            slots, context = props.get("total_slots"), _slot_context(props)
            if context is not None and needs.longest_request_tokens > context:
                raise gate.refusal(
                    f"the longest request takes {needs.longest_request_tokens} tokens, "
                    f"the server has room for {context}; raise ctx-size, or lower max_new_tokens"
                )
            _compare_rendering(http, renderer, gate)
    except (httpx.HTTPError, ValueError, AttributeError) as error:
        raise gate.refusal(f"it answered, and then not as a server does: {error!r}", False) from error
    prompt_ids = renderer.render(_CANARY, None)
    canary = _canary(profile, server, renderer, name, prompt_ids, gate)
    return Facts(
        served_model_name=name,
        slots=slots,
        context_tokens=context,
        kv_tokens=slots * context if slots and context else None,
        version=str(props["build_info"]) if props.get("build_info") else None,
        kv_dtype=None,
        startup_s=round(time.monotonic() - started, 2),
        canary=canary,
    )


class _Gate:
    """Deadline, liveness and the words of a refusal."""

    def __init__(self, server: Server, deadline: float) -> None:
        self._server = server
        self._deadline = deadline

    def wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        while not condition():
            if not self._server.alive:
                status = self._server.process.exit_status if self._server.process else None
                raise self.refusal(f"the process ended with status {status} before it was ready", False)
            if time.monotonic() > self._deadline:
                raise self.refusal(f"{problem} within startup_timeout_s", False)
            time.sleep(_POLL_S)

    def remaining_s(self) -> float:
        return max(1.0, self._deadline - time.monotonic())

    def refusal(self, cause: str, permanent: bool = True) -> LaunchFailed:
        lines = [f"server {self._server.name} is not usable: {cause}."]
        if process := self._server.process:
            lines += [f"Its log ({process.log}) ends:", *(f"  {line}" for line in self._server.log_tail())]
            lines += [f"To run it by hand: {shlex.join(process.command)}"]
        return LaunchFailed("\n".join(lines), permanent)


def _answers(http: httpx.Client) -> bool:
    """llama.cpp answers /health with 503 while it loads; other servers may have /v1/models alone."""
    try:
        health = http.get("/health").status_code
        return health == 200 or (health == 404 and http.get("/v1/models").status_code == 200)
    except httpx.TransportError:
        return False


def _identify(profile: Profile, server: Server, http: httpx.Client, gate: _Gate) -> str:
    """The model name to ask for; a launched server must answer to its own nonce."""
    response = http.get("/v1/models")
    if response.status_code in (401, 403):
        raise gate.refusal(f"it answers {response.status_code}: wrong or missing key (server.api_key_env)")
    try:
        listed = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise gate.refusal(f"/v1/models does not list models: {response.text[:200]!r}") from None
    wanted = server.name if server.process else profile.server.served_model_name
    if wanted and wanted not in listed:
        raise gate.refusal(f"another server answers at {server.url}: it serves {listed}, not {wanted!r}")
    if not listed:
        raise gate.refusal("/v1/models lists no model")
    return wanted or listed[0]


def _props(http: httpx.Client) -> dict[str, Any]:
    """llama.cpp's own facts; other servers have none of this."""
    try:
        response = http.get("/props")
        data = response.json() if response.status_code == 200 else {}
    except (httpx.TransportError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _slot_context(props: dict[str, Any]) -> int | None:
    context = props.get("default_generation_settings", {}).get("n_ctx")
    return context if isinstance(context, int) else None


def _compare_rendering(http: httpx.Client, renderer: ChatRenderer, gate: _Gate) -> None:
    """Our text and ids against the server's own, where it shows them."""
    ours_text = renderer.render_text(_CANARY, None)
    theirs = http.post("/apply-template", json={"messages": _CANARY})
    if theirs.status_code == 200 and (theirs_text := theirs.json().get("prompt")) != ours_text:
        raise gate.refusal(
            "it renders a prompt differently than we do; the chat template is not the same.\n"
            f"  ours:   {ours_text!r}\n  theirs: {theirs_text!r}"
        )
    tokenized = http.post("/tokenize", json={"content": ours_text, "parse_special": True})
    if tokenized.status_code == 200 and (ids := tokenized.json().get("tokens")) is not None:
        ours = renderer.render(_CANARY, None)
        if ids != ours:
            raise gate.refusal(
                f"it tokenizes a prompt differently than we do.\n  ours:   {ours}\n  theirs: {ids}"
            )


def _canary(
    profile: Profile, server: Server, renderer: ChatRenderer, name: str, ids: list[int], gate: _Gate
) -> str:
    """One real answer by the road that every prompt will take."""

    async def ask() -> list[int]:
        async with OpenAIClient(server.url, server.api_key, name) as client:
            sampling = SamplingSettings(temperature=0.0, ebnf=profile.sampling.ebnf)
            completion = await client.complete(ids, sampling, _CANARY_TOKENS, sample=0)
            if completion.prompt_tokens != len(ids):
                raise gate.refusal(
                    f"it counts {completion.prompt_tokens} prompt tokens where we count {len(ids)}"
                )
            return completion.output_ids

    try:
        output_ids = asyncio.run(asyncio.wait_for(ask(), gate.remaining_s()))
    except TimeoutError:
        raise gate.refusal("the first answer never came within startup_timeout_s", False) from None
    except LaunchFailed:
        raise
    except PromptmillError as error:
        raise gate.refusal(f"the first answer failed: {error}", False) from None
    if not output_ids:
        raise gate.refusal("it returns no token ids on /v1/completions; this engine needs them")
    return renderer.decode(output_ids)
