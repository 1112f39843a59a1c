"""Which client speaks to which engine."""

from __future__ import annotations

from promptmill.chat import ChatRenderer
from promptmill.model import Model
from promptmill.serving.client import Client
from promptmill.serving.command import vocabulary
from promptmill.serving.server import Server
from promptmill.serving.sglang_client import SGLangClient
from promptmill.settings import Profile


def make_client(
    profile: Profile, server: Server, served_model_name: str, model: Model, renderer: ChatRenderer
) -> Client:
    """To be made in the event loop that will use it."""
    if profile.server.engine != "sglang":
        # The package openai takes two seconds to import.
        from promptmill.serving.chat_client import ChatClient
        from promptmill.serving.openai_client import CompletionsClient

        address = server.url, server.api_key, served_model_name
        if profile.server.api == "chat":
            return ChatClient(*address, profile.chat.template_kwargs)
        return CompletionsClient(*address)
    return SGLangClient(
        server.url,
        server.api_key,
        vocabulary(model, renderer.vocabulary),
        profile.server.stream_interval,
        profile.server.inactivity_timeout_s,
        profile.server.stream,
    )
