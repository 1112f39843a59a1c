"""OpenAI-compatible servers by the package openai; here those that take and give ids: llama.cpp, vLLM."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
from openai import AsyncOpenAI, DefaultAioHttpClient

from promptmill.errors import ServerError
from promptmill.serving.client import (
    ConnectionBroke,
    ConnectionRefused,
    Load,
    OnTokens,
    Request,
    status_error,
)
from promptmill.settings import SamplingSettings
from promptmill.types import Completion

_TIMEOUT = openai.Timeout(None, connect=10.0)
_LOAD_TIMEOUT_S = 5.0
_WANT_IDS = {
    "return_tokens": True,  # llama.cpp: each chunk's ids, with verbose, under __verbose.tokens
    "verbose": True,
    "return_token_ids": True,  # vLLM: each chunk's ids under choices[0].token_ids
}

# openai 2.8 stands on httpx and later ones on httpx2; a stream that breaks may raise theirs, unwrapped.
_httpx_client = next(c for c in DefaultAioHttpClient.__mro__ if c.__name__ == "AsyncClient")
_httpx: Any = importlib.import_module(_httpx_client.__module__.partition(".")[0])


class OpenAIClient:
    """What both kinds have in common: the connection, its errors, and the sampling."""

    def __init__(self, url: str, api_key: str, served_model_name: str) -> None:
        self._model = served_model_name
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=api_key or "none",
            max_retries=0,  # retries have one owner: the mill
            timeout=_TIMEOUT,
            http_client=DefaultAioHttpClient(timeout=_TIMEOUT, trust_env=False),
        )

    async def load(self) -> Load | None:
        """No load: these servers share no interface for it. That it answers at all is what is asked."""
        try:
            await self._client.with_options(timeout=_LOAD_TIMEOUT_S).models.list()
        except openai.APIStatusError:
            pass
        except (openai.APIConnectionError, _httpx.TransportError) as error:
            raise _broke(error) from error
        return None

    async def close(self) -> None:
        await self._client.close()

    def _common(self, request: Request) -> dict[str, Any]:
        """Arguments of either call."""
        return {
            "model": self._model,
            "max_tokens": request.max_new_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_sampling_arguments(request.sampling, request.sample),
        }


class CompletionsClient(OpenAIClient):
    """Ids in, ids out."""

    async def complete(self, request: Request, on_tokens: OnTokens = lambda ids: None) -> Completion:
        output_ids: list[int] = []
        finish_reason = ""
        prompt_tokens = -1
        with translated_errors():
            arguments = self._common(request)
            arguments["extra_body"] |= _WANT_IDS
            stream: Any = await self._client.completions.create(prompt=request.input_ids, **arguments)
            async for chunk in stream:
                new = _chunk_ids(chunk)
                if new:
                    output_ids.extend(new)
                    on_tokens(new)
                if chunk.choices and chunk.choices[0].finish_reason:
                    finish_reason = chunk.choices[0].finish_reason
                if chunk.usage is not None:
                    prompt_tokens = chunk.usage.prompt_tokens
        check_finish(finish_reason)
        return Completion(output_ids, finish_reason, prompt_tokens)


def check_finish(reason: str) -> None:
    """Raises ConnectionBroke for an answer that is none."""
    if reason not in ("stop", "length"):
        raise ConnectionBroke(f"the answer ended without a finish reason ({reason or 'none'})")


@contextmanager
def translated_errors() -> Iterator[None]:
    """Errors of the package and of what it stands on become ours."""
    try:
        yield
    except openai.APIStatusError as error:
        raise _translate_status(error) from error
    except (openai.APIConnectionError, _httpx.TransportError) as error:
        raise _broke(error) from error
    except json.JSONDecodeError as error:
        raise ConnectionBroke(f"the stream broke off inside an event: {error}") from error
    except openai.APIError as error:
        raise ServerError(f"the server failed: {error.message}") from error


def _sampling_arguments(sampling: SamplingSettings, sample: int) -> dict[str, Any]:
    """Keyword arguments of `create`; what OpenAI does not define goes into the body as it is."""
    arguments: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    for name in ("frequency_penalty", "presence_penalty", "stop"):
        if (value := getattr(sampling, name)) is not None:
            arguments[name] = value
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed + sample
    body: dict[str, Any] = {}
    for name in ("top_k", "min_p", "stop_token_ids"):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    if sampling.repetition_penalty is not None:
        body["repetition_penalty"] = body["repeat_penalty"] = sampling.repetition_penalty
    if sampling.ebnf is not None:
        body["grammar"] = sampling.ebnf
    return {**arguments, "extra_body": body}


def _chunk_ids(chunk: Any) -> list[int]:
    """The ids of one chunk, wherever this kind of server puts them."""
    extra = chunk.model_extra or {}
    if isinstance(verbose := extra.get("__verbose"), dict):
        return list(verbose.get("tokens") or [])
    if chunk.choices and (choice_extra := chunk.choices[0].model_extra):
        return list(choice_extra.get("token_ids") or [])
    return []


def _translate_status(error: openai.APIStatusError) -> Exception:
    body = error.body
    words = str(body["message"]) if isinstance(body, dict) and body.get("message") else error.message
    return status_error(error.status_code, words, error.response.headers.get("Retry-After"))


def _broke(error: Exception) -> ConnectionBroke:
    cause = error.__cause__ or error
    # What was refused is a ConnectTimeout on openai's aiohttp transport.
    refused = isinstance(cause, (_httpx.ConnectError, _httpx.ConnectTimeout))
    return (ConnectionRefused if refused else ConnectionBroke)(f"the connection broke: {cause}")
