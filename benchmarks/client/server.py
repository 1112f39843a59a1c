"""A stand-in for SGLang's /generate that costs little, so that a client is what is measured.

    python -m benchmarks.client.server ANSWERS.json SECONDS

Prints its port. Every answer is one of the file, takes SECONDS, give or take half of it, and comes as SGLang
sends it with --incremental-streaming-output: one token, then `stream_interval` at a time, then [DONE]; or
whole. `max_new_tokens` below its length cuts it.
"""

from __future__ import annotations

import asyncio
import random
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_LOADS = {"timestamp": 0.0, "loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "num_used_tokens": 1}]}
_RID = b"@@rid@@"


class Answers:
    """Answers as bytes, all but the request's id made beforehand."""

    def __init__(self, path: Path) -> None:
        self._answers: list[dict[str, Any]] = orjson.loads(path.read_bytes())

    @lru_cache(maxsize=4096)  # noqa: B019  one object, as long as the process lives
    def pieces(self, number: int, limit: int, step: int, prompt_tokens: int) -> list[tuple[bytes, bytes]]:
        """What stands before and behind the id in each event; one piece where `step` is 0."""
        answer = self._answers[number % len(self._answers)]
        ids, words = answer["ids"][:limit], answer["words"][:limit]
        cuts = [*range(1, len(ids), step), len(ids)] if step else [len(ids)]
        pieces = []
        for start, end in zip([0, *cuts], cuts, strict=False):
            finish = (
                {"type": "length", "length": limit} if len(ids) == limit else {"type": "stop", "matched": 2}
            )
            event = {
                "text": "".join(words[start:end]),
                "output_ids": ids[start:end],
                "meta_info": {
                    "id": _RID.decode(),
                    "finish_reason": finish if end == len(ids) else None,
                    "prompt_tokens": prompt_tokens,
                    "weight_version": "default",
                    "num_retractions": 0,
                    "completion_tokens": end,
                    "cached_tokens": 0,
                    "reasoning_tokens": 0,
                    "dp_rank": None,
                },
            }
            before, _, behind = orjson.dumps(event).partition(_RID)
            pieces.append((before, behind))
        return pieces


class Connection(asyncio.Protocol):
    """One kept-alive connection of one client."""

    def __init__(self, answers: Answers, seconds: float) -> None:
        self._answers = answers
        self._seconds = seconds
        self._random = random.Random(1)
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._random = random.Random(transport.get_extra_info("peername")[1])

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, rest = self._buffer.partition(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
            length = int(fields.get(b"content-length", b"0"))
            if len(rest) < length:
                return
            body, self._buffer = rest[:length], rest[length:]
            self._serve(head.split(b" ", 2)[1], body)

    def _serve(self, path: bytes, body: bytes) -> None:
        if path != b"/generate":
            self._whole(orjson.dumps(_LOADS if path == b"/v1/loads" else {}))
            return
        request = orjson.loads(body)
        params, rid = request["sampling_params"], str(request["rid"]).encode()
        step = params.get("stream_interval", 1) if request.get("stream") else 0
        prompt = request["input_ids"]
        pieces = self._answers.pieces(sum(prompt[20:40]) % 97, params["max_new_tokens"], step, len(prompt))
        loop = asyncio.get_running_loop()
        seconds = self._seconds * self._random.uniform(0.5, 1.5)
        if not request.get("stream"):
            before, behind = pieces[0]
            loop.call_later(seconds, self._whole, before + rid + behind)
            return
        self._transport.write(_STREAM)
        for n, (before, behind) in enumerate(pieces, 1):
            event = b"data: " + before + rid + behind + b"\n\n"
            loop.call_later(seconds * n / len(pieces), self._chunk, event, n == len(pieces))

    def _whole(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def _chunk(self, event: bytes, last: bool) -> None:
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        if last:
            chunk += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self._transport.write(chunk)


async def main() -> None:
    answers, seconds = Answers(Path(sys.argv[1])), float(sys.argv[2])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(answers, seconds), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
