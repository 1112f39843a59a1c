"""The yardstick: a plain aiohttp loop that appends a JSON line an answer. Nothing is retried or durable.

python -m benchmarks.client.yardstick URL PROMPTS.json OUT.jsonl IN_FLIGHT stream|whole WARM_UP
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import IO, Any

import aiohttp

from benchmarks.client.meter import Meter


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{url}/generate", json=body) as response:
        response.raise_for_status()
        if not body["stream"]:
            return dict(await response.json())
        answer: dict[str, Any] = {"text": "", "output_ids": []}
        async for line in response.content:
            if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                event = json.loads(line[6:])
                answer["text"] += event["text"]
                answer["output_ids"] += event["output_ids"]
                answer["meta_info"] = event["meta_info"]
        return answer


async def run(
    url: str, prompts: list[list[int]], out: IO[str], in_flight: int, mode: str, warm_up: int
) -> None:
    left = iter(enumerate(prompts))
    done = 0

    async def worker() -> None:
        nonlocal done
        for number, ids in left:
            params = {"temperature": 0.0, "max_new_tokens": 512, "stream_interval": 32}
            rid = f"{number:08x}"
            body = {"rid": rid, "input_ids": ids, "stream": mode == "stream", "sampling_params": params}
            answer = await ask(session, url, body)
            out.write(json.dumps({"id": rid, "prompt": ids, **answer}) + "\n")
            done += 1

    with Meter(lambda: done, warm_up, len(prompts) - in_flight) as meter:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(worker() for _ in range(in_flight)))
    print(json.dumps(meter.result()))


def main() -> None:
    url, source, path, in_flight, mode, warm_up = sys.argv[1:]
    prompts = json.loads(Path(source).read_text())
    with Path(path).open("a") as out:
        asyncio.run(run(url, prompts, out, int(in_flight), mode, int(warm_up)))


if __name__ == "__main__":
    main()
