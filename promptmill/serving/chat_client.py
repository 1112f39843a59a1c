"""Chat completions, for OpenAI-compatible servers that have nothing else: messages in, texts out.

Reasoning comes as `reasoning_content` or as `reasoning`; a server that does not take it apart leaves it in
the content, markers and all.
"""

from __future__ import annotations

from typing import Any, cast

from promptmill.serving.client import OnTokens, Request
from promptmill.serving.openai_client import OpenAIClient, check_finish, translated_errors
from promptmill.types import Completion, Texts

_REASONING = ("reasoning_content", "reasoning")
NO_ID = 0
"""Told for a piece of text whose ids are not known: that there is one is what counts."""


class ChatClient(OpenAIClient):
    """One server. `template_kwargs` go to its chat template."""

    def __init__(
        self, url: str, api_key: str, served_model_name: str, template_kwargs: dict[str, Any]
    ) -> None:
        super().__init__(url, api_key, served_model_name)
        self._template_kwargs = template_kwargs

    async def complete(self, request: Request, on_tokens: OnTokens = lambda ids: None) -> Completion:
        answer = _Answer(on_tokens)
        with translated_errors():
            arguments = self._common(request)
            if self._template_kwargs:
                arguments["extra_body"]["chat_template_kwargs"] = self._template_kwargs
            if request.tools:
                arguments["tools"] = request.tools
            stream: Any = await self._client.chat.completions.create(
                messages=cast(Any, request.messages), **arguments
            )
            async for chunk in stream:
                answer.take(chunk)
        check_finish(answer.finish_reason)
        return answer.completion()


class _Answer:
    """What has come of one request so far."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.finish_reason = ""
        self._on_tokens = on_tokens
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._has_calls = False
        self._pieces = 0
        self._usage: Any = None

    def take(self, chunk: Any) -> None:
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return
        (choice, *_), extra = chunk.choices, chunk.choices[0].delta.model_extra or {}
        reasoning = next((text for name in _REASONING if isinstance(text := extra.get(name), str)), "")
        content = choice.delta.content or ""
        self._reasoning.append(reasoning)
        self._content.append(content)
        calls = bool(choice.delta.tool_calls)
        self._has_calls |= calls
        if reasoning or content or calls:
            self._pieces += 1
            self._on_tokens([NO_ID])
        if reason := choice.finish_reason:
            self.finish_reason = "stop" if reason == "tool_calls" else reason

    def completion(self) -> Completion:
        usage = self._usage
        details = getattr(usage, "completion_tokens_details", None)
        texts = Texts(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            tokens=usage.completion_tokens if usage else self._pieces,
            reasoning_tokens=getattr(details, "reasoning_tokens", None) or 0,
            has_calls=self._has_calls,
        )
        return Completion([], self.finish_reason, usage.prompt_tokens if usage else -1, texts=texts)
