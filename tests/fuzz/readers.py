"""Broken and odd input for readers, formats and policies, without an end.

    FUZZ_MINUTES=10 python -m tests.fuzz.readers [ROUND]…

Whatever a file holds, it gives rows, rejects or a ConfigError, and every row read is accounted for. A
round is played from its number alone; one that fails is printed with the line that plays it again.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from promptmill.chat import ChatRenderer
from promptmill.errors import ConfigError
from promptmill.model import Model, load_tokenizer, resolve_model
from promptmill.prompts import arrays
from promptmill.prompts.formats import FORMATS
from promptmill.prompts.manifest import Preparation, prepare, read_prompts, read_rejects
from promptmill.prompts.policies import NOTES
from promptmill.prompts.reasons import REASONS
from promptmill.settings import ChatSettings, PolicySettings, Profile

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "deployments" / "demo" / "chat_template.jinja"
SEEDS = sorted((ROOT / "tests" / "unit" / "data").glob("[ITO][0-9]*.json*"))
MEMORY_BYTES = 6 << 30
"""Of address space: a file that claims to hold terabytes must fail, not swap."""

Random = random.Random
ATOMS: list[Any] = [
    *(None, True, 0, -1, 7.5, 2**70, float("nan"), float("inf")),
    *(
        "",
        " \n",
        "text",
        "\0",
        "\ud83d",
        "e\u0301",
        "null",
        "007",
        "[",
        "{}",
        "user",
        "gpt",
        "function_call",
        "tool",
    ),
    *("<|im_end|>", "<functioncall>", "<|endoftext|>", "\n\n\nASSISTANT: ", "USER: a\n\n\nASSISTANT: b"),
    'SYSTEM: x\n{"name": "f"}\nUSER: a\nASSISTANT: b',
    '[{"role": "user", "content": "a"}]',
    *([], {}, [[]], [None], {"role": "user", "content": "a"}, {"from": "human", "value": "a"}),
    *({"type": "image_url"}, {"type": "text", "text": "a"}, {"name": "f", "arguments": "{}"}),
    {"function": {"name": "f", "arguments": "{}"}},
]
KEYS = (
    *(
        "messages",
        "conversations",
        "turns",
        "prompt",
        "question",
        "chat",
        "system",
        "sample",
        "input",
        "output",
    ),
    *(
        "tools",
        "function",
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "tool_call_id",
        "id",
        "name",
        "type",
    ),
    *(
        "arguments",
        "text",
        "function_call",
        "reasoning_content",
        "unit_tests",
        "average_test_score",
        "\ud83d",
    ),
)
NAMES = KEYS[:-1]
BYTES = (
    *(b"\n", b"\n\n", b"\r", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b":", b"\0", b"null", b" " * 5000),
    *(b"\xff", b"\xed\xa0\xbd", b"\xef\xbb\xbf", b"\\ud83d", b"\\u"),
    *(b"NaN", b"1e999", b"9" * 30, b"9" * 5000, b"[" * 2000),
)


def value(rng: Random, depth: int = 0) -> Any:
    """Something odd."""
    kind = rng.random()
    if depth > 3 or kind < 0.5:
        return rng.choice(ATOMS)
    if kind < 0.75:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def bent(item: Any, rng: Random, chance: float) -> Any:
    """`item` with some of what is in it replaced, dropped, repeated or wrapped."""
    if rng.random() < chance:
        return rng.choice([value(rng), [item], [item, item], json.dumps(item), {rng.choice(KEYS): item}])
    if isinstance(item, list):
        kept = [bent(one, rng, chance) for one in item if rng.random() > chance / 2]
        return kept * 2 if rng.random() < chance / 4 else kept
    if isinstance(item, dict):
        return {k: bent(v, rng, chance) for k, v in item.items() if rng.random() > chance / 2}
    return item


def damaged(data: bytes, rng: Random) -> bytes:
    """`data` with bytes changed, cut out, repeated or put in."""
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5, 20))):
        at = rng.randrange(len(out) + 1)
        end = at + rng.randrange(1, 50)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at:end]
            case 2:
                out[at:at] = out[at:end]
            case 3:
                out[at:at] = rng.choice(BYTES)
            case 4 if rng.random() < 0.3:
                del out[at:]
    return bytes(out)


def rows_of(path: Path) -> list[Any]:
    rows: list[Any] = []
    for line in path.read_bytes().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows or [{"prompt": "a"}]


def as_lines(rows: list[Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def as_array(rows: list[Any]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def as_parquet(rows: list[Any]) -> bytes:
    """With Arrow's own types where it finds any, else as JSON text."""
    rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
    for flat in (rows, [{k: json.dumps(v) for k, v in row.items()} for row in rows]):
        try:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(flat), sink)
            return bytes(sink.getvalue())
        except (pa.ArrowException, UnicodeError, OverflowError):
            continue
    return as_lines(rows)


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


WRITERS: list[Callable[[list[Any]], bytes]] = [as_lines, as_lines, as_array, as_parquet]
PACKERS: list[Callable[[bytes], bytes]] = [bytes, bytes, gzip.compress, zst]


def file_of(rng: Random) -> bytes:
    rows = rows_of(rng.choice(SEEDS)) if rng.random() < 0.8 else [value(rng) for _ in range(5)]
    chance = rng.choice((0.0, 0.0, 0.02, 0.02, 0.1, 0.3))
    rows = [bent(row, rng, chance) for row in rows]
    data = rng.choice(WRITERS)(rows)
    if rng.random() < 0.5:
        data = damaged(data, rng)
    data = rng.choice(PACKERS)(data)
    return damaged(data, rng) if rng.random() < 0.15 else data


def partition(rng: Random, source: Path) -> dict[str, Any]:
    """Some settings, the defaults more often than not."""
    part: dict[str, Any] = {"name": "P", "source": str(source)}
    if rng.random() < 0.25:
        part["format"] = rng.choice(list(FORMATS))
    if rng.random() < 0.3:
        part["mode"] = rng.choice(["last_turn", "rollout"])
    if rng.random() < 0.15:
        part["columns"] = {
            name: rng.choice(NAMES) for name in ("prompt", "id", "tools", "system") if rng.random() < 0.4
        }
    if rng.random() < 0.05:
        part["where"] = [
            {"column": rng.choice(NAMES), **rng.choice([{"at_least": 0}, {"one_of": ["a", "7"]}])}
        ]
    if rng.random() < 0.5:
        part["policies"] = {
            name: rng.choice(info.annotation.__args__)
            for name, info in PolicySettings.model_fields.items()
            if isinstance(info.default, str)
        }
    return part


def play(number: int, renderer: ChatRenderer, folder: Path) -> Counter[str]:
    """One round; how it ended. Raises what must not be."""
    rng = random.Random(number)
    source = folder / "source"
    source.write_bytes(file_of(rng))
    settings = {
        "model": "m",
        "partitions": [partition(rng, source)],
        "sampling": {"samples": rng.choice((1, 1, 2))},
    }
    profile = Profile.model_validate({**settings, "classes": {"short": {"max_new_tokens": 300}}})
    context = rng.choice((None, 4096, 400))
    model = Model("m", "1", "m")
    arrays._BLOCK = rng.choice((1 << 20, 64, 1))
    try:
        manifest = prepare(
            Preparation(profile, profile.partitions[0], model, renderer, folder / "out", None, context)
        )
    except ConfigError as error:
        assert "\n" not in str(error), "more than one line"
        return Counter(errors=1)
    prompts, rejects = list(read_prompts(manifest)), list(read_rejects(manifest))
    assert manifest.rows == len(prompts) + len(rejects) == manifest.prompts + sum(manifest.rejected.values())
    assert set(manifest.rejected) <= set(REASONS)
    assert set(manifest.notes) <= set(NOTES)
    assert len({row.row for row in prompts}) == len(prompts)
    for row in prompts:
        assert row.turns
        for message in itertools.chain(*row.turns):
            assert message["role"] in ("system", "user", "assistant", "tool")
            message["content"].encode()
    return Counter(
        files=1, prompts=len(prompts), **{f"rejected_{k}": v for k, v in manifest.rejected.items()}
    )


def make_renderer(folder: Path) -> ChatRenderer:
    profile = Profile.model_validate(
        {"model": "embedded:smollm2", "partitions": [{"name": "P", "source": "p"}]}
    )
    tokenizer = load_tokenizer(profile, resolve_model(profile), folder)
    return ChatRenderer(tokenizer, ChatSettings(template=str(TEMPLATE)))


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    minutes = float(os.environ.get("FUZZ_MINUTES", "10"))
    first = random.SystemRandom().randrange(10**9)
    numbers = map(int, sys.argv[1:]) if len(sys.argv) > 1 else itertools.count(first)
    ends: Counter[str] = Counter()
    failed = played = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        renderer = make_renderer(folder)
        until = time.monotonic() + 60 * minutes
        for number in numbers:
            if len(sys.argv) == 1 and time.monotonic() > until:
                break
            try:
                ends += play(number, renderer, folder)
            except Exception:  # noqa: BLE001  anything at all is what is looked for
                failed += 1
                traceback.print_exc()
                print(f"again: python -m tests.fuzz.readers {number}", flush=True)
            played += 1
            for old in (folder / "out").glob("*"):
                old.unlink()
    print(json.dumps({"rounds": played, "failed": failed, **dict(sorted(ends.items()))}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
