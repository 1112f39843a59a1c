"""A request's sampling_params: what the gate refuses, defaults, ranges."""

from __future__ import annotations

import math
from typing import Any

from promptmill.sim.refusals import gate_error, value_error

FIELDS = [
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
]
_INTEGERS = {
    "max_new_tokens",
    "min_new_tokens",
    "n",
    "top_k",
    "stream_interval",
    "sampling_seed",
    "beam_width",
}
_NUMBERS = {
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
}  # fmt: skip
_FLAGS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}
_TEXTS = {"json_schema", "regex", "ebnf", "structural_tag"}
_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "no_stop_trim": False,
    "stream_interval": None,
    "sampling_seed": None,
}
_BIG = 1 << 30


def check_gate(params: dict[str, Any]) -> None:
    """Raises Refusal for an unknown key or a wrong type, before anything else is looked at."""
    for key, value in params.items():
        if key not in FIELDS:
            expected = ", ".join(f"`{name}`" for name in FIELDS)
            raise gate_error(f"unknown field `{key}`, expected one of {expected}")
        if value is None:
            continue
        if key in _INTEGERS and (isinstance(value, bool) or not isinstance(value, int)):
            raise gate_error(_wrong(value, "i64"))
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise gate_error(_wrong(value, "f64"))
        if key in _FLAGS and not isinstance(value, bool):
            raise gate_error(_wrong(value, "a boolean"))
        if key in _TEXTS and not isinstance(value, str):
            raise gate_error(_wrong(value, "a string"))
        if key in {"stop", "stop_regex"} and not _all(value, str):
            raise gate_error(_wrong(value, "a string or a sequence of strings"))
        if key == "stop_token_ids" and not (isinstance(value, list) and _all(value, int)):
            raise gate_error(_wrong(value, "a sequence of integers"))


def check_shape(body: dict[str, Any]) -> None:
    """The same for the keys beside sampling_params; those that are unknown are ignored."""
    for key in ("rid", "text"):
        value = body.get(key)
        if value is not None and not _all(value, str):
            raise gate_error(_wrong(value, "a string"))
    ids = body.get("input_ids")
    if ids is not None and not (
        isinstance(ids, list) and (_all(ids, int) or all(isinstance(i, list) and _all(i, int) for i in ids))
    ):
        raise gate_error(_wrong(ids[0] if isinstance(ids, list) and ids else ids, "i64"))
    for key in ("stream", "return_logprob", "return_prompt_token_ids"):
        if body.get(key) is not None and not isinstance(body[key], bool):
            raise gate_error(_wrong(body[key], "a boolean"))
    params = body.get("sampling_params")
    if params is not None and not isinstance(params, dict) and not _all(params, dict):
        raise gate_error(_wrong(params, "struct SamplingParams"))


def resolve(params: dict[str, Any]) -> dict[str, Any]:
    """With defaults, every list a list. Raises Refusal where a value is out of range."""
    given = {key: value for key, value in params.items() if value is not None}
    resolved = _DEFAULTS | given
    if "max_new_tokens" in params and params["max_new_tokens"] is None:
        resolved["max_new_tokens"] = _BIG
    for key in ("stop", "stop_regex", "stop_token_ids"):
        value = given.get(key) or []
        resolved[key] = [value] if isinstance(value, str) else list(value)
    _check_ranges(resolved)
    if sum(bool(given.get(key)) for key in ("json_schema", "regex", "ebnf", "structural_tag")) > 1:
        raise value_error("Only one of regex, json_schema, or ebnf can be set.")
    return resolved


def _check_ranges(p: dict[str, Any]) -> None:
    if not math.isfinite(p["temperature"]) or p["temperature"] < 0:
        raise value_error(f"temperature must be a non-negative finite number, got {p['temperature']}.")
    if not 0 < p["top_p"] <= 1:
        raise value_error(f"top_p must be in (0, 1], got {p['top_p']}.")
    if not 0 <= p["min_p"] <= 1:
        raise value_error(f"min_p must be in [0, 1], got {p['min_p']}.")
    if p["top_k"] < 1 and p["top_k"] != -1:
        raise value_error(f"top_k must be -1 (disable) or at least 1, got {p['top_k']}.")
    for key in ("frequency_penalty", "presence_penalty"):
        if not -2 <= p[key] <= 2:
            raise value_error(f"{key} must be in [-2, 2], got {p[key]}.")
    if not 0 < p["repetition_penalty"] <= 2:
        raise value_error(f"repetition_penalty must be in (0, 2], got {p['repetition_penalty']}.")
    if p["min_new_tokens"] < 0:
        raise value_error(f"min_new_tokens must be in [0, max_new_tokens], got {p['min_new_tokens']}.")
    if p["max_new_tokens"] < 0:
        raise value_error(f"max_new_tokens must be at least 0, got {p['max_new_tokens']}.")
    if p["min_new_tokens"] > p["max_new_tokens"]:
        raise value_error(
            f"min_new_tokens must be in [0, max_new_tokens({p['max_new_tokens']})], "
            f"got {p['min_new_tokens']}."
        )
    if len(p["stop"]) > 32:
        raise value_error(f"stop must have at most 32 entries, got {len(p['stop'])}.")


def _all(value: Any, kind: type) -> bool:
    """A `kind`, or a list of them."""
    items = value if isinstance(value, list) else [value]
    return all(isinstance(item, kind) and not (kind is int and isinstance(item, bool)) for item in items)


def _wrong(value: Any, expected: str) -> str:
    if isinstance(value, bool):
        shown = f"boolean `{str(value).lower()}`"
    elif isinstance(value, int):
        shown = f"integer `{value}`"
    elif isinstance(value, float):
        shown = f"floating point `{value}`"
    elif isinstance(value, str):
        shown = f'string "{value}"'
    else:
        shown = "sequence" if isinstance(value, list) else "map"
    return f"invalid type: {shown}, expected {expected}"
