"""Accuracy task by task: after every position in a panel per method, or at the end in a row per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import style
from profcil.reporting.series import mean_and_spread, task_accuracy
from profcil.runs.gather import Group, load_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

WRITTEN = 10  # tasks up to which a panel over half a page has room for its numbers


def by_position(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per method: task by position, the mean over seeds; grey where a task was not introduced yet."""
    groups = load_groups(paths, tell)
    tasks = max(g.runs[0].plan.positions for g in groups)
    across = min(len(groups), 4 if tasks <= 5 else 2 if tasks <= WRITTEN else 3)
    width = style.COLUMN if len(groups) == 1 else style.PAGE
    figure, axes = style.panels(len(groups), across, width, 0.85 * width / across + 0.3)
    for group, ax in zip(groups, axes, strict=True):
        image = cells(ax, mean_tasks(group).T)
        ax.set_title(style.folded(name_of(group, groups), int(12.5 * width / across)))
        ax.set_xlabel("position")
        if style.leftmost(ax):
            ax.set_ylabel("task")
    scale(figure, image, axes, "accuracy (%)")
    return figure, {name_of(g, groups): listed(mean_tasks(g)) for g in groups}


def final(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The paper's heatmap: what is left of every task at the end, a row per method and a panel per stream."""
    groups = load_groups(paths, tell)
    streams = list(dict.fromkeys(g.stream for g in groups))
    most = max(sum(g.stream == s for g in groups) for s in streams)
    figure, axes = style.panels(len(streams), 1, style.COLUMN if most < 2 else style.PAGE * 0.7, 0.8 + 0.2 * most)
    for stream, ax in zip(streams, axes, strict=True):
        own = [g for g in groups if g.stream == stream]
        image = cells(ax, np.stack([mean_tasks(g)[-1] for g in own]))
        ax.set_yticks(range(len(own)), [style.folded(g.label, 28) for g in own])
        ax.set_title(stream)
        ax.set_xlabel("task")
    scale(figure, image, axes, "final accuracy (%)")
    return figure, {name_of(g, groups): listed(mean_tasks(g)[-1:])[0] for g in groups}


def mean_tasks(group: Group) -> np.ndarray:
    """[positions, tasks], the mean over seeds; unknown where one of them has no value."""
    return mean_and_spread([task_accuracy(run) for run in group.runs])[0]


def cells(ax: Axes, values: np.ndarray) -> AxesImage:
    """A grid of percentages, each written in its cell where there is room; rows and columns count from 1."""
    image = ax.imshow(np.ma.masked_invalid(values), cmap="cividis", vmin=0, vmax=100, aspect="auto")
    ax.set_facecolor("#EEEEEE")
    ax.grid(False)
    ax.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8 if values.shape[1] <= WRITTEN else 0.3)
    ax.tick_params(which="both", length=0)
    ax.spines[:].set_visible(False)
    for axis, count in ((ax.xaxis, values.shape[1]), (ax.yaxis, values.shape[0])):
        shown = np.arange(0, count, -(-count // 10))
        axis.set_ticks(shown, labels=[str(i + 1) for i in shown])
    if values.shape[1] <= WRITTEN:
        for row, column in np.argwhere(np.isfinite(values)):
            value = values[row, column]
            colour = "black" if value > 45 else "white"
            ax.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=style.SMALL, color=colour)
    return image


def scale(figure: Figure, image: AxesImage, axes: Sequence[Axes], title: str) -> None:
    bar = figure.colorbar(
        image, ax=axes, label=title, pad=0.02, fraction=0.05, aspect=25, shrink=min(1.0, 4 / figure.get_figheight())
    )
    bar.outline.set_visible(False)


def name_of(group: Group, groups: Sequence[Group]) -> str:
    """The label, and the stream where there are several."""
    alone = len({g.stream for g in groups}) == 1
    return group.label if alone else f"{group.label}: {group.stream}"


def listed(values: np.ndarray) -> list[list[float | None]]:
    return [[round(float(v), 4) if np.isfinite(v) else None for v in row] for row in values]
