"""What crosses the door, by kind and direction: dots on a logarithmic axis, so that a small kind is seen too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import style
from profcil.reporting.figures.heatmap import name_of
from profcil.reporting.series import kinds
from profcil.runs.gather import Group, load_groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECTIONS = {"down": "server to clients", "up": "clients to server"}


def communication(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A row per method, a dot per kind, a stroke for the sum; means over seeds, the warm-up left out."""
    groups = load_groups(paths, tell)
    names = [name_of(g, groups) for g in groups]
    sums = [mean_bytes(g) for g in groups]
    every = sorted({kind for one in sums for kind, _ in one})
    height = 0.9 + 0.22 * len(groups)
    figure, axes = style.panels(2, 2, style.PAGE * 0.8, height, sharey=True, sharex=True)
    for (direction, title), ax in zip(DIRECTIONS.items(), axes, strict=True):
        rows(ax, [{k: v for (k, d), v in one.items() if d == direction} for one in sums], every)
        ax.set_title(title)
        ax.set_xlabel("bytes")
    axes[0].set_yticks(range(len(groups)), [style.folded(name, 32) for name in names])
    axes[0].invert_yaxis()
    style.legend_below(figure, axes, columns=6)
    numbers = {n: {f"{k}, {d}": v for (k, d), v in sorted(s.items())} for n, s in zip(names, sums, strict=True)}
    return figure, numbers


def rows(ax: Axes, totals: Sequence[dict[str, float]], every: Sequence[str]) -> None:
    """One direction: every kind has its own colour and marker; a kind that nobody sent has no dot."""
    ax.set_xscale("log")
    heights = np.arange(len(totals))
    ax.plot([sum(t.values()) for t in totals], heights, "|", color="black", markersize=11, label="sum")
    for i, kind in enumerate(every):
        points = [(t[kind], y) for y, t in enumerate(totals) if t.get(kind)]
        x, y = np.array(points).T if points else (np.array([]), np.array([]))
        ax.plot(x, y, label=kind, **style.look(i) | {"linestyle": "none"})
    ax.tick_params(axis="y", length=0)


def mean_bytes(group: Group) -> dict[tuple[str, str], float]:
    """Mean over seeds; a seed that sent nothing of a kind counts as zero."""
    each = [kinds(run) for run in group.runs]
    return {key: sum(one.get(key, 0) for one in each) / len(each) for one in each for key in one}
