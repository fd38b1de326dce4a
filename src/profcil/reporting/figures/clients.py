"""Fairness over clients: the final accuracy of every client on its own mix of tasks, a row per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import RunFolderError
from profcil.reporting.figures import style
from profcil.reporting.groups import Group, load_groups
from profcil.reporting.paper import stream_title
from profcil.runs.results.stored_run import StoredRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.26  # inches
EXPLANATION = "small marks: clients of all seeds; filled: mean over clients; open: worst client (means over seeds)"


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per stream. Rows of a results store are left out: they do not say which client has which task."""
    groups = [group for group in load_groups(paths, warn) if has_clients(group, warn)]
    if not groups:
        raise RunFolderError("none of the runs has clients to show; give run folders, not a results store")
    streams = list(dict.fromkeys(group.stream for group in groups))
    most = max(sum(group.stream == stream for group in groups) for stream in streams)
    width = style.COLUMN if len(streams) == 1 else style.PAGE
    row = style.row_height([style.folded(group.label, 26) for group in groups], ROW)
    figure, axes = style.panels(len(streams), 2, width, 0.75 + row * most)
    numbers: dict[str, dict[str, Any]] = {}
    for stream, ax in zip(streams, axes, strict=True):
        own = [group for group in groups if group.stream == stream]
        numbers[stream] = {group.label: draw_row(ax, place, group) for place, group in enumerate(own)}
        ax.set_yticks(range(len(own)), [style.folded(group.label, 26) for group in own])
        ax.set(title=stream_title(stream), xlabel="final accuracy of a client (%)", xlim=(0, 100))
        ax.set_ylim(most - 0.5, -0.5)  # rows of all panels have the same height
        ax.tick_params(axis="y", length=0)
    style.explain_below(figure, EXPLANATION)
    return figure, numbers


def has_clients(group: Group, warn: Callable[[str], None]) -> bool:
    if isinstance(group.runs[0], StoredRun):
        warn(f"{group.label} is left out: a results store does not say which client has which task")
        return False
    return True


def draw_row(ax: Axes, place: int, group: Group) -> dict[str, Any]:
    """One method; the numbers drawn."""
    by_seed = [known(run.client_accuracy()) for run in group.runs]
    look = style.group_look(group)
    marks = np.concatenate(by_seed)
    ax.plot(marks, np.full(len(marks), place), "|", color=look["color"], alpha=0.4, markersize=7, clip_on=False)
    mean = float(np.mean([values.mean() for values in by_seed]))
    worst = float(np.mean([values.min() for values in by_seed]))
    point = {"color": look["color"], "marker": look["marker"], "markersize": 5, "zorder": 3, "clip_on": False}
    ax.plot([worst, mean], [place, place], color=look["color"], linewidth=0.9)
    ax.plot(mean, place, **point)
    ax.plot(worst, place, **point, markerfacecolor="white")
    return {"mean": mean, "worst": worst, "clients": [style.to_list(values) for values in by_seed]}


def known(values: np.ndarray) -> np.ndarray:
    """Without clients that have no examples."""
    return values[~np.isnan(values)]
