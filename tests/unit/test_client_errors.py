"""What a status means: one table for all engines."""

from __future__ import annotations

import asyncio
import json

import pytest

from promptmill.errors import ConfigError, PromptRejected, ServerBusy, ServerError
from promptmill.serving.openai_client import CompletionsClient
from promptmill.serving.sglang_client import SGLangClient, body_error

CONTEXT = "The input (85050 tokens) is longer than the model's context length (32768 tokens)."
TOTAL = (
    "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested 40000."
)
ALLOWED = "Input length (9000 tokens) exceeds the maximum allowed length (8186 tokens)."
BUDGET = "Request prompt exceeds the KV memory budget"


def shaped(message: str, form: str) -> bytes:
    """The bodies that SGLang makes of a message."""
    forms = {
        "flat": {"object": "error", "message": message, "type": "BadRequestError", "code": 400},
        "nested": {"error": {"message": message}},
        "plain": {"error": message},
    }
    return json.dumps(forms[form]).encode()


@pytest.mark.parametrize("form", ["flat", "nested", "plain"])
@pytest.mark.parametrize("message", [CONTEXT, TOTAL, ALLOWED, BUDGET])
def test_too_long_is_a_reason_of_its_own(message: str, form: str) -> None:
    error = body_error(400, shaped(message, form))
    assert isinstance(error, PromptRejected)
    assert error.reason == "too_long"
    assert message in error.detail


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_prompt_is_the_rows_fault(status: int) -> None:
    error = body_error(status, b'{"error": "unknown field `max_tokens`"}')
    assert isinstance(error, PromptRejected)
    assert error.reason == "refused_by_server"


@pytest.mark.parametrize("status", [401, 403, 404])
def test_wrong_key_or_address_stops_the_run(status: int) -> None:
    assert isinstance(body_error(status, b"<html>not for you</html>"), ConfigError)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0), ("2", 2), ("1.5", 1.5), ("3600", 60), ("-4", 0), ("Mon, 30 Nov 2026 08:00:00 GMT", 60)],
)
@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_busy_server_is_waited_for_as_long_as_it_asks(
    status: int, header: str | None, seconds: float
) -> None:
    error = body_error(status, b"<html>proxy</html>", header)
    assert isinstance(error, ServerBusy)
    assert error.retry_after_s == seconds


def test_internal_error_is_the_servers() -> None:
    error = body_error(500, b"Internal Server Error")
    assert type(error) is ServerError
    assert "Internal Server Error" in str(error)


def test_no_client_has_a_total_time_limit() -> None:
    """With one of ten minutes, long answers at full load are cut and asked again for ever."""

    async def limits() -> None:
        sglang = SGLangClient("http://127.0.0.1:9", "", 100, 32, 600.0)
        completions = CompletionsClient("http://127.0.0.1:9", "", "m")
        try:
            assert sglang._session.timeout.total is None
            assert sglang._session.timeout.sock_read is None
            limit = completions._client.timeout
            assert (limit.read, limit.write, limit.pool) == (None, None, None)
            assert completions._client.max_retries == 0, "retries have one owner"
        finally:
            await sglang.close()
            await completions.close()

    asyncio.run(limits())
