"""Remedies for memory. Pure.

Out of GPU memory the ladder goes down: memory fraction, prefill chunk, CUDA graphs, requests at a time, what
touches the answers least first. Out of room for the KV pool the fraction goes up, unless that is known to end
in the other trouble. The KV dtype is never changed: it changes the answers.
"""

from __future__ import annotations

import math

from promptmill.serving.deaths import Death, History, Step, Verdict, number, step, wait

_FRACTION = "mem-fraction-static"
_FRACTION_STEP = 0.05
_FRACTIONS = (0.5, 0.94)
"""Below, the trouble is another one; above, nothing is left to work with."""
_GUESSED_FRACTION = 0.85
_USUAL_CHUNK, _LEAST_CHUNK = 8192, 1024
_USUAL_GRAPH_BS, _LEAST_GRAPH_BS = 256, 8
_GRAPH_BS = ("cuda-graph-max-bs-decode", "cuda-graph-max-bs")
_FEWER = 0.75
_LOADING = ("arguments", "loading")
_OTHERS = "See nvidia-smi for other processes; or raise tp-size, or take a smaller or quantized model."
_ROOM = (
    "Make room by hand: more GPUs (tp-size), a shorter context-length or max_new_tokens, a smaller model. "
    "An fp8 KV cache holds twice as many tokens and changes the answers: only you can choose it."
)


def gpu_oom(h: History) -> Verdict:
    if h.last.phase == "start" and h.evidence.log_phase in _LOADING:
        return _oom_while_loading(h)
    if h.evidence.log_phase == "graphs":
        return graph_capture(h)
    when = "under load" if h.evidence.log_phase in ("serving", "") else "at the start"
    return _less_memory(h, f"CUDA out of memory {when}")


def _oom_while_loading(h: History) -> Verdict:
    told = h.evidence.numbers
    others = told.get("total_gib", 0) - told.get("free_gib", 0) - told.get("process_gib", math.inf)
    if others > 1 or (len(h.deaths) > h.streak and h.streak == 1):
        return wait(h, "GPU memory is in use by somebody else, or not free yet", _OTHERS)
    return Verdict("stop", "the weights do not fit into the GPUs' memory", advice=_OTHERS)


def graph_capture(h: History) -> Verdict:
    why = "no memory for CUDA graphs" if h.last.signature == "gpu_oom" else "capturing CUDA graphs failed"
    smaller = _smaller_graphs(h, why) if h.streak == 1 else None
    return smaller or _less_memory(h, why)


def low_headroom(h: History) -> Verdict:
    told = h.evidence.numbers
    left = f"{told['headroom_gib']:.2f} GiB" if "headroom_gib" in told else "too little"
    wanted = f", {told['wanted_gib']:.2f} wanted" if "wanted_gib" in told else ""
    return _less_memory(h, f"{left} of GPU memory left{wanted}")


def _less_memory(h: History, why: str) -> Verdict:
    """The ladder downwards."""
    now = h.last.fraction
    if now is None:
        guess = Step(_FRACTION, None, _GUESSED_FRACTION)
        return step(f"{why}; the server's own fraction is not known", guess)
    after = round(now - _FRACTION_STEP, 2)
    if after >= _FRACTIONS[0] and after > _too_small(h):
        return step(why, Step(_FRACTION, now, after))
    lower = _smaller_chunk(h, why) or _smaller_graphs(h, why) or fewer_requests(h, why)
    return lower or Verdict("stop", f"{why}, and nothing is left to lower", advice=_ROOM)


def _too_small(h: History) -> float:
    """The largest fraction that is known to leave too few KV tokens."""
    known = [d for d in h.deaths if d.signature in ("kv_budget", "kv_too_small") and d.fraction is not None]
    minima = [d.evidence.numbers.get("minimum", 0.0) for d in known if d.evidence]
    return max([*minima, *(d.fraction or 0.0 for d in known)], default=0.0)


def _smaller_chunk(h: History, why: str) -> Verdict | None:
    flag = "chunked-prefill-size"
    now = number(h.last.flags.get(flag), h.last.facts and h.last.facts.chunked_prefill_size)
    after = _USUAL_CHUNK if now is not None and now <= 0 else int(now or _USUAL_CHUNK) // 2
    return step(why, Step(flag, _whole(now), after)) if after >= _LEAST_CHUNK else None


def _smaller_graphs(h: History, why: str) -> Verdict | None:
    names = [name for name in _GRAPH_BS if name in h.last.flags]
    if not names and h.version is not None:  # between these two nobody has looked
        names = ["cuda-graph-max-bs-decode"] if h.version >= (0, 5, 23) else []
        names = ["cuda-graph-max-bs"] if h.version < (0, 5, 10) else names
    if not names:
        return None
    now = number(h.last.flags.get(names[0]), h.last.facts and h.last.facts.cuda_graph_max_bs)
    after = int(now or _USUAL_GRAPH_BS) // 2
    return step(why, Step(names[0], _whole(now), after)) if after >= _LEAST_GRAPH_BS else None


def fewer_requests(h: History, why: str, only_running: bool = False) -> Verdict | None:
    """Fewer than were running, where that is known; else than were allowed, unless `only_running`."""
    flag = "max-running-requests"
    allowed = number(h.last.flags.get(flag), h.last.facts and h.last.facts.max_running_requests)
    running = number(h.evidence.numbers.get("running"), h.last.in_flight or None)
    if running is None and only_running:
        return None
    limit = min((n for n in (allowed, running) if n is not None), default=0)
    after = int(limit * _FEWER)
    return step(why, Step(flag, _whole(allowed), after)) if after >= 1 else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def kv_budget(h: History) -> Verdict:
    why = "the weights leave no room for the KV pool"
    minimum = h.evidence.numbers.get("minimum")
    base = minimum if minimum is not None else h.last.fraction
    if base is None:
        guess = Step(_FRACTION, None, _GUESSED_FRACTION)
        return step(f"{why}; the server's own fraction is not known", guess)
    wanted = math.ceil(round((base + _FRACTION_STEP) * 100, 6)) / 100
    return _more_memory(h, why, wanted, minimum or 0.0)


def kv_too_small(h: History) -> Verdict:
    told = h.evidence.numbers
    have, need = told.get("kv_tokens", 0), told.get("wanted_tokens", 0)
    why = f"the longest request takes {need:.0f} tokens, the KV pool holds {have:.0f}"
    now = h.last.fraction
    if now is None or "max-total-tokens" in h.last.flags or need > 1.5 * have:
        return Verdict("stop", why, advice=f"Raise max-total-tokens or ctx-size if set. {_ROOM}")
    return _more_memory(h, why, round(now + 0.03, 2))


def _more_memory(h: History, why: str, wanted: float, minimum: float = 0.0) -> Verdict:
    """The way up, unless it is known to end in the other trouble."""
    now, wanted = h.last.fraction, min(wanted, _FRACTIONS[1])
    tight = [d.fraction for d in h.deaths if _is_tight(d, h.last) and d.fraction is not None]
    if tight and min(tight) <= wanted:
        low, high = ("its default" if now is None else f"{now:g}"), f"{min(tight):g}"
        return Verdict(
            "stop",
            f"squeezed: {_FRACTION} {low} leaves too few KV tokens, {high} too little GPU memory",
            advice=f"Both {low} and {high} fail. {_ROOM}",
        )
    if wanted <= max(now or 0.0, minimum):
        return Verdict(
            "stop", f"{why}, and {_FRACTION} cannot be raised to more than {wanted:g}", advice=_ROOM
        )
    return step(why, Step(_FRACTION, now, wanted))


def _is_tight(death: Death, last: Death) -> bool:
    """Whether it tells that its fraction leaves too little GPU memory, launched as the last one was."""
    phase = death.evidence.log_phase if death.evidence else ""
    if death.signature not in ("gpu_oom", "low_headroom") or phase in _LOADING:
        return False
    return phase != "graphs" or all(death.flags.get(name) == last.flags.get(name) for name in _GRAPH_BS)
