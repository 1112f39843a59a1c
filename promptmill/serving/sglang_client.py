"""The client of SGLang's native /generate: input ids in, output ids out, streamed in groups of tokens.

One request a prompt, never a batch: one item's abort would end the whole call. Checked against 0.5.23.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from contextlib import suppress
from typing import Any

import aiohttp
import orjson

from promptmill.errors import PromptRejected, ServerBusy, ServerError
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

_CONNECT_S = 10.0
_LOAD_TIMEOUT_S = 5.0
_ABORT_TIMEOUT_S = 2.0
_KEEP_ALIVE_S = 3.0  # the server closes idle connections after 5 s; ours are gone before that
_RID_HASH = 16
_ASK = {
    # Ids are the record: the text that the server makes of them is not used, but must not cost a marker.
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
}


class SGLangClient:
    """One SGLang server. `vocabulary` is its number of token ids."""

    def __init__(
        self,
        url: str,
        api_key: str,
        vocabulary: int,
        stream_interval: int,
        silence_timeout_s: float,
        stream: bool = True,
    ) -> None:
        self._url = url
        self._vocabulary = vocabulary
        self._stream_interval = stream_interval
        self._silence_timeout_s = silence_timeout_s
        self._stream = stream
        self._dumped: dict[int, tuple[SamplingSettings, dict[str, Any]]] = {}
        # SGLang aborts an id once more two seconds after its stream has ended, so none is ever used again.
        self._numbers = itertools.count(secrets.randbits(31))
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # a proxy has no business between us and our server
        )

    async def complete(self, request: Request, on_tokens: OnTokens = lambda ids: None) -> Completion:
        self._check(request.input_ids)
        # The server aborts by prefix, so all request ids have one width.
        rid = f"{request.key[:_RID_HASH]:0<{_RID_HASH}}-{next(self._numbers) % (1 << 32):08x}"
        body = {
            "rid": rid,
            "input_ids": request.input_ids,
            "stream": self._stream or request.on_trial,
            "sampling_params": self._sampling_params(request),
        }
        answer = _Answer(on_tokens)
        try:
            await self._ask(body, answer)
        except (asyncio.CancelledError, ConnectionBroke, TimeoutError) as error:
            await self._abort(rid)  # or it goes on decoding for nobody
            if isinstance(error, TimeoutError):
                silent = f"the stream was silent for {self._silence_timeout_s:.0f} s"
                raise ConnectionBroke(silent) from None
            raise
        return answer.completion()

    async def load(self) -> Load | None:
        timeout = aiohttp.ClientTimeout(total=_LOAD_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._url}/v1/loads", timeout=timeout) as response:
                if response.status != 200:
                    return None
                return _parse_load(orjson.loads(await response.read()))
        except aiohttp.ClientConnectorError as error:
            raise ConnectionRefused(f"the connection was refused: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConnectionBroke(f"the connection broke: {error!r}") from error
        except ValueError:
            return None

    async def close(self) -> None:
        await self._session.close()

    def _check(self, input_ids: list[int]) -> None:
        """What would kill the server, scheduler and all, is not sent to it. Raises PromptRejected."""
        if not input_ids:
            raise PromptRejected("no_ids", "there is nothing to send")
        low, high = min(input_ids), max(input_ids)
        if low < 0 or high >= self._vocabulary:
            wrong = low if low < 0 else high
            raise PromptRejected("id_out_of_vocabulary", f"id {wrong} of {self._vocabulary}")

    def _sampling_params(self, request: Request) -> dict[str, Any]:
        params: dict[str, Any] = {
            **self._dump(request.sampling),
            **_ASK,
            "max_new_tokens": request.max_new_tokens,
        }
        if self._stream_interval:
            params["stream_interval"] = self._stream_interval
        if request.sampling.seed is not None:
            params["sampling_seed"] = request.sampling.seed + request.sample
        return params

    def _dump(self, sampling: SamplingSettings) -> dict[str, Any]:
        """What all requests with this sampling have in common; there are as many as partitions."""
        known = self._dumped.get(id(sampling))
        if known is None or known[0] is not sampling:
            dumped = sampling.model_dump(exclude_none=True, exclude={"samples", "seed"})
            known = self._dumped[id(sampling)] = (sampling, dumped)
        return known[1]

    async def _ask(self, body: dict[str, Any], answer: _Answer) -> None:
        """Send, and read every event into `answer`. A stream silent after its first token times out."""
        loop, move_at = asyncio.get_running_loop(), 0.0
        try:
            async with (
                asyncio.timeout(None) as silence,
                # As a payload: aiohttp looks for the right class of payload, and merges headers, for long.
                self._session.post(
                    f"{self._url}/generate",
                    data=aiohttp.BytesPayload(orjson.dumps(body), content_type="application/json"),
                ) as response,
            ):
                if response.status != 200:
                    raise body_error(
                        response.status, await response.read(), response.headers.get("Retry-After")
                    )
                if not body["stream"]:
                    answer.take(await response.read())
                    return
                buffer = b""
                async for piece in response.content.iter_any():
                    buffer += piece
                    *events, buffer = buffer.split(b"\n\n")
                    for event in events:
                        answer.take(event.removeprefix(b"data: "))
                    # A timer is moved once in a hundredth of its time: moving it costs as much as an event.
                    now = loop.time()
                    if answer.output_ids and now >= move_at:
                        silence.reschedule(now + self._silence_timeout_s)
                        move_at = now + self._silence_timeout_s / 100
        except aiohttp.ClientConnectorError as error:
            raise ConnectionRefused(f"the connection was refused: {error}") from error
        except aiohttp.ClientError as error:
            raise ConnectionBroke(f"the connection broke: {error!r}") from error

    async def _abort(self, rid: str) -> None:
        timeout = aiohttp.ClientTimeout(total=_ABORT_TIMEOUT_S)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(
                f"{self._url}/abort_request", json={"rid": rid}, timeout=timeout
            ) as response:
                await response.read()


class _Answer:
    """What has come of one request so far."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.output_ids: list[int] = []
        self._on_tokens = on_tokens
        self._finish: dict[str, Any] | None = None
        self._meta: dict[str, Any] = {}

    def take(self, data: bytes) -> None:
        """One event. Raises the error that it carries."""
        if data.strip() == b"[DONE]" or not data.strip():
            return
        try:
            event = orjson.loads(data)
        except ValueError as error:
            raise ConnectionBroke(f"the stream broke off inside an event: {error}") from error
        if "error" in event:
            code = event["error"].get("code") if isinstance(event["error"], dict) else None
            raise body_error(code if isinstance(code, int) else 500, data)
        self._meta = event["meta_info"]
        self._add(event.get("output_ids") or [])
        self._finish = self._meta.get("finish_reason") or self._finish

    def completion(self) -> Completion:
        """Raises what an answer stands for that did not end by stop or length."""
        finish = self._finish
        if finish is None:
            raise ConnectionBroke("the answer ended without a finish reason")
        if finish["type"] == "abort":
            words = str(finish.get("message") or "aborted")
            status = finish.get("status_code")
            # Aborted without a status: somebody asked the server to, and the prompt is not to blame.
            raise status_error(int(status), words) if status else ServerBusy(f"aborted: {words}")
        if finish["type"] not in ("stop", "length"):
            raise ServerError(f"the answer ended with {finish}")
        retractions = int(self._meta.get("num_retractions") or 0)
        prompt_tokens = int(self._meta["prompt_tokens"])
        return Completion(self.output_ids, str(finish["type"]), prompt_tokens, retractions)

    def _add(self, ids: list[int]) -> None:
        """Events carry what is new, or everything so far without --incremental-streaming-output."""
        before, total = len(self.output_ids), self._meta.get("completion_tokens")
        if before + len(ids) != total and len(ids) == total:
            ids = ids[before:]
        if ids:
            self.output_ids.extend(ids)
            self._on_tokens(ids)


def body_error(status: int, body: bytes, retry_after: str | None = None) -> Exception:
    """By status and by what the body says, in any of the shapes that SGLang's bodies have."""
    words = body.decode("utf-8", "replace")[:500]
    with suppress(ValueError):
        data = orjson.loads(body)
        error = data.get("error", data) if isinstance(data, dict) else data
        if isinstance(error, dict):
            error = error.get("message") or error.get("detail") or words
        words = str(error)[:500]
    if "Duplicate request ID" in words:
        return ServerBusy(words)  # an earlier try of ours is still under way there
    return status_error(status, words, retry_after)


def _parse_load(data: Any) -> Load:
    """Summed over data-parallel ranks; shape of 0.5.9 to 0.5.23. Raises ValueError."""
    ranks = data.get("loads") if isinstance(data, dict) else None
    if not isinstance(ranks, list) or not all(isinstance(rank, dict) for rank in ranks):
        raise ValueError("no loads")

    def total(name: str) -> int:
        return sum(int(rank.get(name) or 0) for rank in ranks)

    stamps = [float(rank["timestamp"]) for rank in ranks if rank.get("timestamp")]
    return Load(
        running=total("num_running_reqs"),
        queued=total("num_waiting_reqs"),
        used_tokens=total("num_used_tokens"),
        as_of=max(stamps, default=None),
    )
