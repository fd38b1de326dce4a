"""Accuracy of every task: after every position in a panel per method, or at the end in a row per method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import style
from profcil.reporting.groups import Group, load_groups
from profcil.reporting.paper import stream_title
from profcil.reporting.series import mean_and_spread, task_accuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_WRITTEN = 10  # with more tasks than this the cells are too small for numbers


def draw_by_position(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per method: task by position, mean over seeds. Tasks that are not introduced yet are grey."""
    groups = load_groups(paths, warn)
    tasks = max(group.runs[0].positions for group in groups)
    across = min(len(groups), panels_across(tasks))
    per_stream = Counter(group.stream for group in groups)
    if len(set(per_stream.values())) == 1 and max(per_stream.values()) <= across + 1:
        across = max(per_stream.values())  # a row per stream
    width = style.COLUMN if len(groups) == 1 else style.PAGE
    panel_width = width / across
    figure, axes = style.panels(len(groups), across, width, 0.85 * panel_width + 0.3)
    numbers = {}
    for group, ax in zip(groups, axes, strict=True):
        name = group_name(group, groups)
        accuracy = mean_tasks(group)
        numbers[name] = to_lists(accuracy)
        image = draw_cells(ax, accuracy.T)
        ax.set_title(style.folded(name, int(12.5 * panel_width)))
        ax.set_xlabel("position")
        if style.leftmost(ax):
            ax.set_ylabel("task")
    draw_scale(figure, image, axes, "accuracy (%)\ngrey: task not introduced yet")
    return figure, numbers


def panels_across(tasks: int) -> int:
    """The number of panels side by side."""
    if tasks <= 5:
        return 4
    return 2 if tasks <= MAX_WRITTEN else 3


def draw_final(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The heatmap of the paper: final accuracy of every task, a row per method and a panel per stream."""
    groups = load_groups(paths, warn)
    by_stream: dict[str, list[Group]] = {}
    for group in groups:
        by_stream.setdefault(group.stream, []).append(group)
    rows = [len(own) for own in by_stream.values()]
    width = style.COLUMN if max(rows) < 2 else style.PAGE * 0.7
    row = style.row_height([style.folded(group.label, 28) for group in groups], 0.22)
    height = 0.62 + row * sum(rows) / len(rows)  # the title and axis of a panel, and its rows
    figure, axes = style.panels(len(rows), 1, width, height, height_ratios=rows)
    for (stream, own), ax in zip(by_stream.items(), axes, strict=True):
        final = [mean_tasks(group)[-1] for group in own]
        image = draw_cells(ax, np.stack(final))
        labels = [style.folded(group.label, 28) for group in own]
        ax.set_yticks(range(len(own)), labels)
        ax.set_title(stream_title(stream))
        ax.set_xlabel("task")
    draw_scale(figure, image, axes, "final accuracy (%)")
    numbers = {}
    for group in groups:
        name = group_name(group, groups)
        (numbers[name],) = to_lists(mean_tasks(group)[-1:])
    return figure, numbers


def mean_tasks(group: Group) -> np.ndarray:
    """[positions, tasks], the mean over seeds; NaN if one of the seeds has no value."""
    by_seed = [task_accuracy(run) for run in group.runs]
    mean, _ = mean_and_spread(by_seed)
    return mean


def draw_cells(ax: Axes, values: np.ndarray) -> AxesImage:
    """A grid of percentages, written into the cells if they are large enough. Rows and columns count from 1."""
    known = np.ma.masked_invalid(values)
    image = ax.imshow(known, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    rows, columns = values.shape
    ax.set_facecolor("#EEEEEE")
    ax.grid(False)
    ax.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    line = 0.8 if columns <= MAX_WRITTEN else 0.3
    ax.grid(which="minor", color="white", linewidth=line)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    for axis, count in ((ax.xaxis, columns), (ax.yaxis, rows)):
        shown = np.arange(0, count, -(-count // 10))
        axis.set_ticks(shown, labels=[str(i + 1) for i in shown])
    if columns <= MAX_WRITTEN:
        write_values(ax, values)
    return image


def write_values(ax: Axes, values: np.ndarray) -> None:
    """Writes every known value into its cell, in black or white by its background."""
    for row, column in np.argwhere(np.isfinite(values)):
        value = values[row, column]
        colour = "black" if value > 55 else "white"
        text = f"{value:.0f}"
        ax.text(column, row, text, ha="center", va="center", fontsize=style.SMALL, color=colour)


def draw_scale(figure: Figure, image: AxesImage, axes: Sequence[Axes], title: str) -> None:
    """The colour scale beside the panels."""
    shrink = min(1.0, 4 / figure.get_figheight())
    bar = figure.colorbar(image, ax=axes, label=title, pad=0.02, fraction=0.05, aspect=25, shrink=shrink)
    bar.outline.set_visible(False)


def group_name(group: Group, groups: Sequence[Group]) -> str:
    """The label, and the stream if there are several streams."""
    streams = {other.stream for other in groups}
    return group.label if len(streams) == 1 else f"{group.label}: {stream_title(group.stream)}"


def to_lists(values: np.ndarray) -> list[list[float | None]]:
    """The values for JSON, with None in place of NaN."""
    return [style.to_list(row) for row in values]
