"""`promptmill plan`: what a run would do, as text, as JSON and as a picture. No server is started."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from promptmill.errors import ConfigError
from promptmill.generation.loop import MEANS
from promptmill.generation.picker import PRIOR_TOKENS
from promptmill.planning.estimate import NIGHT_HOURS, Estimate, Servers, estimate, longest_request
from promptmill.planning.survey import BOUNDS, Survey, survey
from promptmill.prompts.manifest import make_current, prepare
from promptmill.prompts.policies import NOTES
from promptmill.prompts.reasons import with_remedy
from promptmill.run import Redo, Run, check_rendered
from promptmill.serving import command
from promptmill.settings import Profile
from promptmill.types import Tally

USUAL_KV_TOKENS = (159_000, 376_000)
"""What the run on eight GPUs of 96 GB had: by the model's own type, and by fp8."""


@dataclass(frozen=True, slots=True)
class Part:
    """One partition of a plan."""

    survey: Survey
    tally: Tally
    redo: Redo | None
    refused: str
    """Why a run would not take it, whatever it accepts; empty where it would."""
    asked_format: str
    """As the profile has it: `auto`, or the format itself."""
    mean_output: float
    is_measured: bool
    """Whether that mean is of answers, and not assumed."""


@dataclass(frozen=True, slots=True)
class Plan:
    parts: list[Part]
    estimates: dict[int, Estimate | None]
    """By KV tokens; None where the longest request does not fit."""
    night_hours: float
    why_no_estimate: str = ""

    def to_json(self) -> dict[str, Any]:
        estimates = [
            {"kv_tokens": kv, "fits": found is not None, **(_estimate_json(found, self.night_hours))}
            for kv, found in self.estimates.items()
        ]
        return {
            "partitions": {part.tally.partition: _part_json(part) for part in self.parts},
            "estimates": estimates,
            "night_hours": self.night_hours,
            "longest_request_tokens": longest_request([part.survey for part in self.parts]),
        }

    def lines(self) -> Iterator[str]:
        for part in self.parts:
            yield from _part_lines(part)
        yield from _estimate_lines(self)


def make_plan(run: Run, kv_tokens: Sequence[int], mean_output: float | None) -> Plan:
    """Read and render what the run would, and look at it.

    The manifests become the current ones, but for one that a run would refuse, and unless a run is under way.
    """
    for kv in kv_tokens:
        if kv < 1:
            raise ConfigError(f"--kv-tokens {kv}: a number above 0 is wanted.")
    if mean_output is not None and not mean_output >= 1:  # it may be no number
        raise ConfigError(f"--mean-output {mean_output:g}: a number above 0 is wanted.")
    manifests = [prepare(run.preparation(name)) for name in run.partitions]
    run.store.refresh()
    remembered = run.store.recall(MEANS) or {}
    parts = [_part(run, found, mean_output, remembered) for found in survey(manifests, run.store)]
    if not run.store.lock.holder():
        for part in parts:
            if not part.refused and not (part.redo and part.redo.is_refused):
                make_current(part.survey.manifest, run.store.manifests)
    return _with_estimates(run.profile, parts, kv_tokens)


def _part(run: Run, found: Survey, mean_output: float | None, remembered: Mapping[str, float]) -> Part:
    manifest = found.manifest
    mean = mean_output or remembered.get(manifest.partition, PRIOR_TOKENS)
    refused = ""
    try:
        check_rendered(manifest, run.profile.run.max_unrendered)
    except ConfigError as error:
        refused = str(error)
    return Part(
        survey=found,
        tally=run.store.tally(manifest),
        redo=run.redo(manifest),
        refused=refused,
        asked_format=run.profile.partition(manifest.partition).format,
        mean_output=min(mean, manifest.max_new_tokens),
        is_measured=mean_output is None and manifest.partition in remembered,
    )


def _with_estimates(profile: Profile, parts: list[Part], kv_tokens: Sequence[int]) -> Plan:
    flags = command.server_flags(profile)
    night = profile.run.max_hours or NIGHT_HOURS
    sizes = list(dict.fromkeys(kv_tokens)) or _usual_sizes(profile, flags)
    if not sizes:
        why = f"the pace of {profile.server.engine} is not known; --kv-tokens N estimates as for SGLang"
        return Plan(parts, {}, night, why)
    count = len(profile.server.urls) or profile.server.replicas
    conservativeness = _conservativeness(flags)
    surveys = [part.survey for part in parts]
    means = {part.tally.partition: part.mean_output for part in parts}
    found = {kv: estimate(surveys, means, Servers(kv, count, conservativeness)) for kv in sizes}
    return Plan(parts, found, night)


def _usual_sizes(profile: Profile, flags: Mapping[str, Any]) -> list[int]:
    if profile.server.engine != "sglang":
        return []
    total = flags.get("max-total-tokens")
    return [int(total)] if isinstance(total, int | str) and str(total).isdigit() else [*USUAL_KV_TOKENS]


def _conservativeness(flags: Mapping[str, Any]) -> float:
    said = flags.get("schedule-conservativeness", 1.0)
    try:
        number = float(str(said))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"server.flags.schedule-conservativeness: a number is wanted, not {said!r}.")
    return number


def _part_json(part: Part) -> dict[str, Any]:
    survey, redo = part.survey, part.redo
    return {
        **survey.manifest.to_json(),
        **part.tally.to_json(),
        "rejected_by_reason": survey.manifest.rejected,
        "requests_left": int(survey.left.sum()),
        "tokens": {
            "mean": round(float(survey.tokens.mean()), 1) if len(survey.tokens) else 0.0,
            **{f"p{share}": survey.percentile(share) for share in (50, 95, 99)},
            "histogram": {"up_to": [*BOUNDS, None], "prompts": survey.histogram()},
        },
        "families": survey.family_count(),
        "reusable_tokens": survey.reusable_tokens(),
        "repeats": int(survey.repeats.sum()),
        "redo": {"rows": redo.rows, "answered": redo.answered, "changed": redo.changed} if redo else None,
        "refused": part.refused,
        "mean_output": round(part.mean_output, 1),
        "mean_output_is_measured": part.is_measured,
    }


def _estimate_json(found: Estimate | None, night_hours: float) -> dict[str, Any]:
    return {**found.to_json(), "nights": found.nights(night_hours)} if found else {}


def _part_lines(part: Part) -> Iterator[str]:
    survey, manifest = part.survey, part.survey.manifest
    chosen = ", chosen by auto" if part.asked_format == "auto" and manifest.format != "auto" else ""
    yield (
        f"{manifest.partition}: {manifest.rows:,} rows ({manifest.kind}{chosen}), "
        f"{manifest.prompts:,} prompts, {manifest.prompt_tokens:,} tokens, "
        f"longest {manifest.longest_prompt:,}; {part.tally.pending:,} pending, "
        f"at most {manifest.max_new_tokens:,} new tokens each"
    )
    for note, n in manifest.notes.items():
        yield f"  {n:,} {note}: {NOTES[note]}"
    for reason, n in manifest.rejected.items():
        yield f"  {n:,} rejected: {with_remedy(reason)}"
    for example in manifest.examples:
        yield f"    {example}"
    if part.refused:
        yield f"  WARNING: a run would not take it: {part.refused}"
    if part.redo:
        note = "; a run wants --accept-redo for that" if part.redo.is_refused else ""
        yield f"  WARNING: {part.redo}{note}"
    if manifest.prompts:
        yield f"  tokens: {_histogram(survey)}"
    if survey.family_count():
        share = survey.reusable_tokens() / max(1, manifest.prompt_tokens)
        yield (
            f"  {survey.family_count():,} families that begin alike: "
            f"{share:.0%} of the prompt tokens can come from the server's cache"
        )
    elsewhere = int(survey.repeats.sum()) - manifest.notes.get("duplicate_joined", 0)
    if elsewhere > 0:
        yield f"  {elsewhere:,} rows repeat one of another partition: they are answered by its answer"


def _histogram(survey: Survey) -> str:
    total = len(survey.tokens)
    labels = [f"≤{_short(bound)}" for bound in BOUNDS] + [f">{_short(BOUNDS[-1])}"]
    shares = zip(labels, survey.histogram(), strict=True)
    return " · ".join(f"{label} {_percent(n, total)}" for label, n in shares if n)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)


def _percent(n: int, total: int) -> str:
    return f"{100 * n / total:.0f} %" if 200 * n >= total else "<1 %"


def _estimate_lines(plan: Plan) -> Iterator[str]:
    left = sum(int(part.survey.left.sum()) for part in plan.parts)
    if not left:
        yield "nothing is left to ask."
        return
    if plan.why_no_estimate:
        yield f"no estimate of hours: {plan.why_no_estimate}."
        return
    yield f"estimate for {left:,} requests, {_means(plan)}; simulated, at the pace of Kimi-K2.5 on 8 GPUs:"
    for kv, found in plan.estimates.items():
        if found is None:
            need = longest_request([part.survey for part in plan.parts])
            yield f"  {kv:,} KV tokens: too few, the longest prompt and its cap take {need:,}"
            continue
        servers = f"{found.servers} x " if found.servers > 1 else ""
        pace = f"{_hours(found.hours)} at {found.output_tokens_per_s:,.0f} tokens/s"
        nights = found.nights(plan.night_hours)
        word = f"{nights:,} nights" if nights > 1 else "one night"
        yield f"  {servers}{kv:,} KV tokens: {pace}; {word} of {plan.night_hours:g} h, starts not counted"


def _means(plan: Plan) -> str:
    means = sorted(
        {(round(part.mean_output), part.is_measured) for part in plan.parts if part.survey.left.any()}
    )
    low, high = means[0][0], means[-1][0]
    said = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    measured = [is_measured for _, is_measured in means]
    source = (
        "as measured" if all(measured) else "partly assumed" if any(measured) else "assumed: --mean-output"
    )
    return f"answers of {said} tokens on average, {source}"


def _hours(hours: float) -> str:
    if hours < 48:
        return f"{hours:.1f} h" if hours >= 0.1 else f"{hours * 60:.1f} min"
    return f"{hours:,.0f} h ({hours / 24:.1f} days without a break)"
