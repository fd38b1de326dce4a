"""Traffic by kind and direction: dots on a logarithmic axis, so that small kinds are visible too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import style
from profcil.reporting.figures.heatmap import group_name
from profcil.reporting.groups import Group, load_groups
from profcil.reporting.series import bytes_by_kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIRECTIONS = {"down": "server to clients", "up": "clients to server"}


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A row per method, a dot per kind, a bar for the sum. Means over seeds, without the warm-up."""
    groups = load_groups(paths, warn)
    names = [group_name(group, groups) for group in groups]
    sums = [mean_bytes(group) for group in groups]
    kinds = sorted({kind for by_kind in sums for kind, _ in by_kind})
    labels = [style.folded(name, 32) for name in names]
    height = 0.9 + style.row_height(labels, 0.22) * len(groups)
    figure, axes = style.panels(2, 2, style.PAGE * 0.8, height, sharey=True, sharex=True)
    counts = [count for by_kind in sums for count in by_kind.values() if count]
    totals_sent = [sum(in_direction(by_kind, way).values()) for by_kind in sums for way in DIRECTIONS]
    for (direction, title), ax in zip(DIRECTIONS.items(), axes, strict=True):
        totals = [in_direction(by_kind, direction) for by_kind in sums]
        draw_direction(ax, totals, kinds)
        ax.set_title(title)
        ax.set_xlabel("bytes sent in the stream")
        style.bytes_axis(ax, 0.5 * min(counts), 2 * max(totals_sent), steps=(1,))
    axes[0].set_yticks(range(len(groups)), labels)
    axes[0].set_ylim(len(groups) - 0.5, -0.5)
    style.legend_below(figure, axes, columns=6)
    numbers = {}
    for name, by_kind in zip(names, sums, strict=True):
        ordered = sorted(by_kind.items())
        numbers[name] = {f"{kind}, {direction}": count for (kind, direction), count in ordered}
    return figure, numbers


def in_direction(by_kind: dict[tuple[str, str], float], direction: str) -> dict[str, float]:
    return {kind: count for (kind, way), count in by_kind.items() if way == direction}


def draw_direction(ax: Axes, totals: Sequence[dict[str, float]], kinds: Sequence[str]) -> None:
    """One direction. Every kind has its own colour and marker; a kind that was not sent has no dot."""
    heights = np.arange(len(totals))
    sums = [sum(by_kind.values()) for by_kind in totals]
    ax.plot(sums, heights, "|", color="black", markersize=11, label="sum")
    for i, kind in enumerate(kinds):
        sent = [row for row, by_kind in enumerate(totals) if by_kind.get(kind)]
        counts = [totals[row][kind] for row in sent]
        look = style.look(i)
        look["linestyle"] = "none"
        ax.plot(np.array(counts), np.array(sent), label=kind, **look)
    ax.tick_params(axis="y", length=0)


def mean_bytes(group: Group) -> dict[tuple[str, str], float]:
    """Mean over seeds by (kind, direction); a seed that sent nothing of a kind counts as zero."""
    by_seed = [bytes_by_kind(run) for run in group.runs]
    keys = dict.fromkeys(key for sums in by_seed for key in sums)
    means = {}
    for key in keys:
        total = sum(sums.get(key, 0) for sums in by_seed)
        means[key] = total / len(by_seed)
    return means
