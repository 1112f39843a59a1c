"""One partition while it is being answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from promptmill.chat import ChatRenderer
from promptmill.generation.figures import Counter
from promptmill.generation.prompts import PromptMaker
from promptmill.generation.resume import is_resumable, kept_tokens
from promptmill.settings import Profile, SamplingSettings
from promptmill.store.store import Store
from promptmill.types import Manifest, Tally


@dataclass(slots=True)
class Partition:
    """Owned by the mill's loop."""

    manifest: Manifest
    maker: PromptMaker
    sampling: SamplingSettings
    resumable: bool
    """Whether an answer can go on from the tokens of a broken stream."""
    varies: bool
    """Whether a prompt that is asked again may get another answer."""
    kept: Callable[[Sequence[int]], list[int]]
    """Output ids of a broken stream that the next request goes on from."""
    length_class: str
    cap: int | None
    """Requests of its class in flight, at most."""
    weight: float
    waiter: Future[Tally] | None = None
    """Of whoever waits for it in `generate`."""
    in_flight: int = 0
    over: bool = False

    def release(self, error: Exception) -> None:
        """Whoever waits for it gets the error."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.set_exception(error)


def make_partition(
    profile: Profile, store: Store, manifest: Manifest, renderer: ChatRenderer, retry_failed: bool
) -> Partition:
    settings = profile.partition(manifest.partition)
    sampling = profile.sampling_for(settings)

    resumable = is_resumable(sampling) and profile.server.api != "chat"

    def kept(ids: Sequence[int]) -> list[int]:
        if not resumable:
            return []
        return kept_tokens(ids, sampling, manifest.max_new_tokens, renderer.end_ids)

    return Partition(
        manifest=manifest,
        maker=PromptMaker(store, manifest, renderer, retry_failed, kept),
        sampling=sampling,
        resumable=resumable,
        varies=sampling.temperature > 0 and sampling.seed is None,
        kept=kept,
        length_class=settings.length_class,
        cap=profile.classes[settings.length_class].max_in_flight,
        weight=settings.weight,
    )


def count(store: Store, manifest: Manifest, retry_failed: bool) -> Counter:
    """Requests that are done and, each conversation going on to its end, will be."""
    return Counter(*store.count(manifest, retry_failed))
