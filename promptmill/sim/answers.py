"""From a request's state to the JSON that a client gets: text, ids, meta_info."""

from __future__ import annotations

import time
from typing import Any

from promptmill.sim.hub import Hub, State
from promptmill.sim.refusals import Refusal, http_error, value_error


def final_text(state: State) -> str:
    """The text of a finished request, without what stopped it."""
    ids, finish = state.output_ids, state.finish or {}
    matched = finish.get("matched")
    if finish.get("type") == "stop" and not state.sampling["no_stop_trim"]:
        if isinstance(matched, int):
            return state.detokenizer.whole(ids[:-1])
        if isinstance(matched, str):
            return state.detokenizer.whole(ids).partition(matched)[0] if matched else ""
    return state.detokenizer.whole(ids)


def refusal_of(finish: dict[str, Any] | None) -> Refusal | None:
    """An abort that an unstreamed call answers with an error instead of a result."""
    status = finish.get("status_code") if finish and finish["type"] == "abort" else None
    if status is None or finish is None:
        return None
    return value_error(finish["message"]) if status == 400 else http_error(status, finish["message"])


def meta_info(
    hub: Hub, state: State, count: int, finish: dict[str, Any] | None, first: bool
) -> dict[str, Any]:
    """As 0.5.23 writes it; `count` output tokens are in this chunk or before it."""
    timed = hub.args["enable_metrics"]
    received, admitted, prefilled = state.scheduled
    meta: dict[str, Any] = {
        "id": state.rid,
        "finish_reason": finish,
        "prompt_tokens": len(state.prompt_ids),
        "weight_version": "default",
        "num_retractions": state.retractions,
    }
    if timed:
        meta |= {"storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0}
        meta |= {"forward_entry_time": admitted, "prefill_finished_time": prefilled}
        meta["queue_time"] = max(0.0, admitted - received) * hub.speed
    if state.logprobs is not None:
        meta |= _logprobs(state, count)
    meta |= {"reasoning_tokens": state.reasoning_tokens, "completion_tokens": count}
    meta["cached_tokens"] = state.cached_tokens
    if finish is not None:
        meta["weight_versions"] = [{"version": "default", "start": 0, "end": count}]
    meta["cached_tokens_details"] = (
        {"device": state.cached_tokens, "host": 0} if state.cached_tokens else None
    )
    meta["dp_rank"] = None
    if finish is not None:
        meta["e2e_latency"] = (state.finished_at - state.received) * hub.speed
    if timed:
        meta |= _times(hub, state, finish is not None, first)
    return meta


def chunk(hub: Hub, state: State, text: str, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
    if hub.args["skip_tokenizer_init"]:
        del body["text"]
    return body


def _times(hub: Hub, state: State, finished: bool, first: bool) -> dict[str, Any]:
    sent = {"response_sent_to_client_ts": state.first_at if state.stream else time.time()}
    if not finished:
        return sent if first else {}
    times: dict[str, Any] = {
        "request_received_ts": state.received,
        "first_token_latency": (state.first_at - state.received) * hub.speed if state.first_at else None,
        "api_server_dispatch_finish_ts": state.dispatched,
    }
    if state.stream:
        times |= sent
    times["request_finished_ts"] = state.finished_at
    if len(state.output_ids) > 1 and state.finished_at > state.first_at:
        elapsed = (state.finished_at - state.first_at) * hub.speed
        times["decode_throughput"] = (len(state.output_ids) - 1) / elapsed
    return times if state.stream else times | sent


def _logprobs(state: State, count: int) -> dict[str, Any]:
    """Invented, but a function of the token, and of the right shape."""
    assert state.logprobs is not None
    start, top = state.logprobs
    asked = state.prompt_ids[start:] if 0 <= start < len(state.prompt_ids) else []
    prompt: list[list[Any]] = [[_logprob(token), token, None] for token in asked]
    if prompt:
        prompt[0][0] = None
    output = [[_logprob(token), token, None] for token in state.output_ids[:count]]
    meta: dict[str, Any] = {"input_token_logprobs": prompt, "output_token_logprobs": output}
    meta["output_token_logprobs_length"] = len(output)
    if top > 0:
        meta["input_top_logprobs"] = [None if entry[0] is None else [entry] * top for entry in prompt]
        meta["output_top_logprobs"] = [[entry] * top for entry in output]
    return meta


def _logprob(token: int) -> float:
    return -((token * 2_654_435_761) % 10_000) / 10_000 - 0.01
