"""Prompts for `bench_plan.py`: word problems and agent conversations, shaped like gsm8k's and SWE-agent's.

Made of the words and lines of Python's own library, so that a tokenizer meets words as they come in real
text; or of the rows in gsm8k_test.jsonl and agent_conversations.jsonl of a given folder, again and again.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SHORT_WORDS = 45
SYSTEM_CHARACTERS, TURNS, TURN_CHARACTERS = 5_000, 18, 1_500
LIBRARY_CHARACTERS = 4_000_000


def write_rows(folder: Path, short: int, long: int, data: Path | None) -> int:
    """So many rows in short.jsonl and agent.jsonl; returns the characters of their messages."""
    if data:
        short_rows = _repeated(data / "gsm8k_test.jsonl", "question")
        long_rows = _repeated(data / "agent_conversations.jsonl", "messages")
    else:
        library = _library()
        short_rows, long_rows = _problems(library), _conversations(library)
    characters = 0
    for name, rows, count in (("short", short_rows, short), ("agent", long_rows, long)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for row in itertools.islice(rows, count):
                said = row.get("messages") or [{"content": row["question"]}]
                characters += sum(len(message["content"]) for message in said)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return characters


def _library() -> str:
    texts, held = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        held += len(texts[-1])
        if held > LIBRARY_CHARACTERS:
            break
    return "\n".join(texts)


def _problems(library: str) -> Iterator[Row]:
    rng = random.Random(1)
    words = re.findall(r"\b[a-z]{2,12}\b", library)
    while True:
        chosen = [
            rng.choice(words) if rng.random() > 0.1 else str(rng.randint(2, 99)) for _ in range(SHORT_WORDS)
        ]
        yield {"question": " ".join(chosen).capitalize() + "?"}


def _conversations(library: str) -> Iterator[Row]:
    """One system message for all, then turns that are pieces of programs and of what they say."""
    rng = random.Random(2)

    def piece(characters: int) -> str:
        start = rng.randrange(len(library) - characters)
        return library[start : start + characters]

    system = {"role": "system", "content": piece(SYSTEM_CHARACTERS)}
    while True:
        roles = ("user", "assistant")
        turns = [
            {"role": roles[n % 2], "content": piece(rng.randint(100, 2 * TURN_CHARACTERS))}
            for n in range(TURNS)
        ]
        yield {"messages": [system, *turns, {"role": "user", "content": piece(200)}]}


def _repeated(path: Path, column: str) -> Iterator[Row]:
    """The rows of a file again and again, each with its number said, so that no two are the same."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(itertools.cycle(rows)):
        if column == "question":
            yield {column: f"{number}. {row[column]}"}
            continue
        said = [{"role": m["role"], "content": m["content"]} for m in row[column]]
        said[-1]["content"] += f" ({number})"
        yield {column: said}
