"""Accuracy over positions: a line per method with a band over seeds, a panel per stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting import series
from profcil.reporting.figures import style
from profcil.runs.gather import Group, load_groups
from profcil.runs.reader import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DODGE = 0.05  # positions between two lines: equal ones would hide each other


def accuracy(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The clients' mean accuracy on the tasks they have met; the last point is FAA."""
    return curves(load_groups(paths, tell), series.seen_accuracy, "accuracy on met tasks (%)")


def cta(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The clients' mean accuracy on the task they meet; the mean of the points is CTA."""
    return curves(load_groups(paths, tell), series.current_accuracy, "current-task accuracy (%)")


def curves(
    groups: Sequence[Group], value: Callable[[Run], np.ndarray], title: str
) -> tuple[Figure, dict[str, dict[str, Any]]]:
    streams = list(dict.fromkeys(g.stream for g in groups))
    looks = {label: style.look(i) for i, label in enumerate(dict.fromkeys(g.label for g in groups))}
    width = style.COLUMN if len(streams) == 1 else style.PAGE
    figure, axes = style.panels(len(streams), 3, width, 2.1, sharey=True)
    numbers: dict[str, dict[str, Any]] = {}
    for stream, ax in zip(streams, axes, strict=True):
        own = [g for g in groups if g.stream == stream]
        beside = min(DODGE, 0.3 / len(own)) * (np.arange(len(own)) - (len(own) - 1) / 2)
        numbers[stream] = {g.label: line(ax, g, value, looks[g.label], x) for g, x in zip(own, beside, strict=True)}
        ax.set_title(stream)
        ax.set_xlabel("position")
        style.positions_axis(ax, own[0].runs[0].plan.positions)
        ax.set_ylim(0, 100)
    axes[0].set_ylabel(title)
    several = any(len(g.runs) > 1 for g in groups)
    style.legend_below(figure, axes, "band: ± one standard deviation over seeds" if several else None)
    return figure, numbers


def explain(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """Why accuracy is kept or lost: above it, over positions; below, whether the memory still points at the truth."""
    from matplotlib.figure import Figure

    groups = load_groups(paths, tell)
    streams = list(dict.fromkeys(g.stream for g in groups))
    looks = {label: style.look(i) for i, label in enumerate(dict.fromkeys(g.label for g in groups))}
    figure = Figure(figsize=(style.COLUMN if len(streams) == 1 else style.PAGE, 3.6), layout="constrained")
    axes = figure.subplots(2, len(streams), squeeze=False, sharex="col", sharey="row")
    numbers: dict[str, dict[str, Any]] = {stream: {} for stream in streams}
    for row, (name, value) in enumerate({"accuracy": series.seen_accuracy, "centred": series.alignment}.items()):
        for stream, ax in zip(streams, axes[row], strict=True):
            own = [g for g in groups if g.stream == stream]
            kept = [g for g in own if not all(np.isnan(value(run)).all() for run in g.runs)]
            numbers[stream][name] = {g.label: line(ax, g, value, looks[g.label], 0.0) for g in kept}
            style.positions_axis(ax, own[0].runs[0].plan.positions)
    for stream, above, below in zip(streams, *axes, strict=True):
        above.set_title(stream)
        below.set_xlabel("position")
    axes[0, 0].set(ylabel="accuracy on met tasks (%)", ylim=(0, 100))
    axes[1, 0].set(ylabel="centred alignment", ylim=(None, 1.02))
    several = any(len(g.runs) > 1 for g in groups)
    style.legend_below(figure, axes.ravel().tolist(), "band: ± one standard deviation over seeds" if several else None)
    return figure, numbers


def line(
    ax: Axes, group: Group, value: Callable[[Run], np.ndarray], look: dict[str, Any], beside: float
) -> dict[str, Any]:
    """Draws one group, a little beside the others; the numbers drawn."""
    mean, spread = series.mean_and_spread([value(run) for run in group.runs])
    x = np.arange(1, len(mean) + 1) + beside
    ax.plot(x, mean, label=group.label, **look)
    if len(group.runs) > 1:
        ax.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    seeds = [run.config["seed"] for run in group.runs]
    return {"mean": listed(mean), "sd": listed(spread), "seeds": seeds}


def listed(values: np.ndarray) -> list[float | None]:
    """For JSON, which knows no NaN."""
    return [round(float(v), 4) if np.isfinite(v) else None for v in values]
