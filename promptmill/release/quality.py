"""What an answer is worth. Pure; it can be redone from the ids at any time."""

from __future__ import annotations

from collections.abc import Sequence

from promptmill.splitting import Split
from promptmill.types import HARMLESS, Completion, Status

REPETITION_WINDOW = 24
REPETITION_TIMES = 4


def judge(completion: Completion, split: Split, max_new_tokens: int) -> tuple[Status, list[str]]:
    """The status of a finished answer and its flags.

    truncated  ended by a length limit (flag `clipped` where the server's limit was below the one asked for)
    empty      finished without content
    flagged    has content and something is wrong with it
    """
    flags = list(split.flags)
    stopped = completion.finish_reason == "stop"
    if texts := completion.texts:
        tokens, repetitive = texts.tokens, is_repetitive(f"{texts.reasoning} {texts.content}".split())
    else:
        ids = completion.output_ids
        tokens, repetitive = len(ids), is_repetitive(ids[:-1] if stopped else ids)
    if repetitive:
        flags.append("repetition")
    if texts and "\ufffd" in split.reasoning + split.content:  # of ids, the split itself knows better
        flags.append("cut_character")
    if completion.finish_reason == "length":
        if tokens < max_new_tokens:
            flags.append("clipped")
        return "truncated", flags
    if not split.content:
        return "empty", flags
    return ("answered" if HARMLESS.issuperset(flags) else "flagged"), flags


def is_repetitive(ids: Sequence[int] | Sequence[str]) -> bool:
    """Whether the answer ends in a loop: its last REPETITION_WINDOW ids (or words), REPETITION_TIMES over."""
    for period in range(1, REPETITION_WINDOW + 1):
        length = max(period * REPETITION_TIMES, REPETITION_WINDOW)
        if len(ids) < length or ids[-1] != ids[-1 - period]:
            continue
        tail = ids[-length:]
        if tail[period:] == tail[:-period]:
            return True
    return False
