"""The texts of an answer that has no token ids, taken apart. Pure."""

from __future__ import annotations

from promptmill.splitting import Split
from promptmill.types import Texts


def split_texts(texts: Texts, cut: bool, opened: bool, markers: tuple[str, str]) -> Split:
    """Reasoning and content.

    `cut` says that the answer ended at its cap, `opened` that the prompt ended inside reasoning, and
    `markers` what opens and closes it. A server that takes reasoning apart has said what it is; with one that
    does not, it ends at the first closing marker, as text.
    """
    open_marker, close_marker = markers
    flags = ["tool_calls_lost"] if texts.has_calls else []
    reasoning, content = texts.reasoning.strip(), texts.content
    if reasoning or not close_marker:
        return Split(reasoning, content.strip(), texts.reasoning_tokens, flags)
    before, closed, after = content.partition(close_marker)
    begun = bool(open_marker) and before.lstrip().startswith(open_marker)
    inside = before.lstrip().removeprefix(open_marker).strip()
    if closed and (opened or begun):
        return Split(inside, after.strip(), texts.reasoning_tokens, flags)
    if inside and (begun or opened):
        flags.append("reasoning_never_closed")
        if begun or cut:
            return Split(inside, "", texts.tokens, flags)
    return Split("", content.strip(), texts.reasoning_tokens, flags)
