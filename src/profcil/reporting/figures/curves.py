"""Accuracy over positions: a line per method with a band over seeds, a panel per stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting import series
from profcil.reporting.figures import style
from profcil.reporting.groups import Group, load_groups
from profcil.reporting.paper import stream_title
from profcil.runs.reader import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = Callable[[Run], np.ndarray]  # one value for each position


def draw_accuracy(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The mean accuracy of the clients on the tasks they have met; the last point is FAA."""
    return draw_curves(load_groups(paths, warn), series.seen_accuracy, "accuracy on met tasks (%)")


def draw_cta(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The mean accuracy of the clients on their current task; the mean of the points is CTA."""
    return draw_curves(load_groups(paths, warn), series.current_accuracy, "current-task accuracy (%)")


def draw_curves(groups: Sequence[Group], values: Values, title: str) -> tuple[Figure, dict[str, dict[str, Any]]]:
    """A panel per stream with a line for each group."""
    streams = list(dict.fromkeys(group.stream for group in groups))
    width = style.COLUMN if len(streams) == 1 else style.PAGE
    figure, axes = style.panels(len(streams), 3, width, 2.1, sharey=True)
    numbers: dict[str, dict[str, Any]] = {}
    for stream, ax in zip(streams, axes, strict=True):
        own = [group for group in groups if group.stream == stream]
        numbers[stream] = {group.label: draw_line(ax, group, values) for group in own}
        ax.set_title(stream_title(stream))
        ax.set_xlabel("position")
        style.positions_axis(ax, own[0].runs[0].positions)
        ax.set_ylim(0, 100)
        if style.leftmost(ax):
            ax.set_ylabel(title)
    style.legend_below(figure, axes, legend_title(groups), order=style.ordered_labels(groups))
    return figure, numbers


def draw_explanation(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """Accuracy over positions above, and below it the alignment of the memory with the true class means."""
    from matplotlib.figure import Figure

    groups = load_groups(paths, warn)
    streams = list(dict.fromkeys(group.stream for group in groups))
    width = style.COLUMN if len(streams) == 1 else style.PAGE
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    axes = figure.subplots(2, len(streams), squeeze=False, sharex="col", sharey="row")
    numbers: dict[str, dict[str, Any]] = {stream: {} for stream in streams}
    quantities = {"accuracy": series.seen_accuracy, "centred": series.alignment}
    for row, (name, values) in enumerate(quantities.items()):
        for stream, ax in zip(streams, axes[row], strict=True):
            own = [group for group in groups if group.stream == stream]
            lines = {}
            for group in own:
                if has_values(group, values):
                    lines[group.label] = draw_line(ax, group, values)
            numbers[stream][name] = lines
            style.positions_axis(ax, own[0].runs[0].positions)
    for stream, above, below in zip(streams, *axes, strict=True):
        above.set_title(stream_title(stream))
        below.set_xlabel("position")
    axes[0, 0].set(ylabel="accuracy on met tasks (%)", ylim=(0, 100))
    axes[1, 0].set(ylabel="centred alignment", ylim=(None, 1))
    style.legend_below(figure, axes.ravel().tolist(), legend_title(groups), order=style.ordered_labels(groups))
    return figure, numbers


def legend_title(groups: Sequence[Group]) -> str | None:
    has_bands = any(len(group.runs) > 1 for group in groups)
    return "band: ± one standard deviation over seeds" if has_bands else None


def has_values(group: Group, values: Values) -> bool:
    return any(not np.isnan(values(run)).all() for run in group.runs)


def draw_line(ax: Axes, group: Group, values: Values) -> dict[str, Any]:
    """Draws the line and band of one group; the numbers drawn."""
    look = style.group_look(group)
    by_seed = [values(run) for run in group.runs]
    mean, spread = series.mean_and_spread(by_seed)
    x = np.arange(1, len(mean) + 1)
    ax.plot(x, mean, label=group.label, clip_on=False, zorder=3, **look)
    if len(group.runs) > 1:
        low = mean - spread
        high = mean + spread
        ax.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    seeds = [run.config["seed"] for run in group.runs]
    return {"mean": style.to_list(mean), "sd": style.to_list(spread), "seeds": seeds}
