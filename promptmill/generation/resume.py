"""Which tokens of a broken stream may be kept. Pure.

The retry sends prompt + kept tokens and asks for the rest; ids are joined, never texts. Verified on SGLang
0.5.23: in float32 the joined answer equals the undisturbed one. What counts output only starts over:
penalties diverge within two tokens, and a grammar would begin anew in the middle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from promptmill.settings import SamplingSettings


def is_resumable(sampling: SamplingSettings) -> bool:
    """Whether an answer with this sampling can be continued from its tokens at all."""
    penalties = sampling.frequency_penalty or sampling.presence_penalty
    repetition = sampling.repetition_penalty not in (None, 1.0)
    return not penalties and not repetition and sampling.ebnf is None


def kept_tokens(
    ids: Sequence[int], sampling: SamplingSettings, max_new_tokens: int, end_ids: Collection[int]
) -> list[int]:
    """The output ids to go on from; empty where the answer starts over.

    Nothing from an end token on is kept, and at least one token is left to ask for. The server looks for a
    stop text in what it makes itself, so as many tokens are made again as the longest one has bytes.
    """
    if not is_resumable(sampling):
        return []
    kept = list(ids[: max_new_tokens - 1])
    ends = {*end_ids, *(sampling.stop_token_ids or ())}
    kept = kept[: next((n for n, token in enumerate(kept) if token in ends), len(kept))]
    seam = max((len(text.encode("utf-8", "surrogatepass")) for text in sampling.stop or ()), default=0)
    return kept[: max(0, len(kept) - seam)]
