"""A plan as a picture: how long the prompts are, and how long they take. Needs the extra `plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from promptmill.errors import ConfigError
from promptmill.planning.plan import Plan
from promptmill.planning.survey import BOUNDS


def check_plot(path: Path) -> None:
    """That a picture can be drawn, before anything is read for it. Raises ConfigError."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: the name of a .png file is wanted.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot: matplotlib is missing; install promptmill with the extra plot: .[plot]"
        ) from None


def draw(plan: Plan, path: Path) -> None:
    """Write the picture. Raises ConfigError where that cannot be done."""
    from matplotlib.figure import Figure

    drawn = [(kv, found) for kv, found in plan.estimates.items() if found]
    figure = Figure(figsize=(10 if drawn else 6, 4), layout="constrained")
    left, *right = figure.subplots(1, 2 if drawn else 1, squeeze=False)[0]
    _histograms(plan, left)
    if right:
        (axes,) = right
        bars = axes.bar([f"{kv:,}" for kv, _ in drawn], [found.hours for _, found in drawn], color="tab:gray")
        axes.bar_label(bars, [f"{found.hours:,.3g} h" for _, found in drawn])
        axes.set(xlabel="KV tokens of a server", ylabel="hours, estimated", title="Serving without a break")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror}.") from None


def _histograms(plan: Plan, axes: Any) -> None:
    """Prompts by their length, the partitions on top of each other."""
    counts = {part.tally.partition: part.survey.histogram() for part in plan.parts}
    used = [place for place in range(len(BOUNDS) + 1) if any(count[place] for count in counts.values())]
    places = range(min(used, default=0), max(used, default=0) + 1)
    labels = [f"≤{BOUNDS[p]:,}" if p < len(BOUNDS) else f">{BOUNDS[-1]:,}" for p in places]
    below = [0] * len(places)
    for name, count in counts.items():
        heights = [count[place] for place in places]
        axes.bar(labels, heights, bottom=below, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.tick_params(axis="x", rotation=45)
    axes.set(xlabel="prompt tokens", ylabel="prompts", title="Prompts by length")
    axes.legend()
