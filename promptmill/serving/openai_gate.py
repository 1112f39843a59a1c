"""What the gate asks of OpenAI-compatible servers; llama.cpp tells the most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from promptmill.chat import ChatRenderer
from promptmill.serving.facts import Facts
from promptmill.serving.server import Server
from promptmill.serving.start import Start
from promptmill.settings import Profile
from promptmill.types import Message


def wait_until_ready(profile: Profile, server: Server, http: httpx.Client, start: Start) -> Facts:
    """Raises LaunchFailed."""
    start.wait_for(lambda: _answers(http), "its port never answered")
    name = _identify(profile, server, http, start)
    props = _props(http)
    slots, context = props.get("total_slots"), _slot_context(props)
    return Facts(
        served_model_name=name,
        slots=slots,
        context_tokens=context,
        kv_tokens=slots * context if slots and context else None,
        version=str(props["build_info"]) if props.get("build_info") else None,
    )


def compare_rendering(
    http: httpx.Client, messages: Sequence[Message], renderer: ChatRenderer, start: Start
) -> None:
    """Our text and ids against the server's own, where it shows them. Raises LaunchFailed."""
    ours_text = renderer.render_text(messages, None)
    theirs = http.post("/apply-template", json={"messages": list(messages)})
    if theirs.status_code == 200 and (theirs_text := theirs.json().get("prompt")) != ours_text:
        raise start.refusal(
            "it renders a prompt differently than we do; the chat template is not the same.\n"
            f"  ours:   {ours_text!r}\n  theirs: {theirs_text!r}"
        )
    tokenized = http.post("/tokenize", json={"content": ours_text, "parse_special": True})
    if tokenized.status_code == 200 and (ids := tokenized.json().get("tokens")) is not None:
        ours = renderer.render(messages, None)
        if ids != ours:
            raise start.refusal(
                f"it tokenizes a prompt differently than we do.\n  ours:   {ours}\n  theirs: {ids}"
            )


def _answers(http: httpx.Client) -> bool:
    """llama.cpp answers /health with 503 while it loads; other servers may have /v1/models alone."""
    try:
        health = http.get("/health").status_code
        return health == 200 or (health == 404 and http.get("/v1/models").status_code == 200)
    except httpx.TransportError:
        return False


def _identify(profile: Profile, server: Server, http: httpx.Client, start: Start) -> str:
    """The model name to ask for; a launched server must answer to its own nonce."""
    response = http.get("/v1/models")
    if response.status_code in (401, 403):
        raise start.refusal(f"it answers {response.status_code}: wrong or missing key (server.api_key_env)")
    try:
        listed = [str(model["id"]) for model in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise start.refusal(f"/v1/models does not list models: {response.text[:200]!r}") from None
    wanted = server.name if server.process else profile.server.served_model_name
    if wanted and wanted not in listed:
        raise start.refusal(f"another server answers at {server.url}: it serves {listed}, not {wanted!r}")
    if not listed:
        raise start.refusal("/v1/models lists no model")
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
