"""Replay gap and downstream drop: whether they correlate within each method, over seeds and strengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import DataError, RunFolderError
from profcil.reporting.figures import inputs, style
from profcil.reporting.looks import method_look
from profcil.reporting.paper import method_rank, method_title
from profcil.runs.results.store import is_store

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"mild": "o", "medium": "s", "severe": "^"}  # as in the paper


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """The figure of all runs of the given studies."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        if is_store(path):
            raise RunFolderError(f"{path} is a results store, which has no replay gaps; give the folder of the study")
        rows += inputs.read_mismatch(Path(path))
    return draw_rows(rows)


def draw_rows(rows: Sequence[dict[str, Any]]) -> tuple[Figure, dict[str, Any]]:
    """A panel per method, or per method and dataset, with a least-squares line and Spearman's rho.

    Panels share the axis of drops. They do not share the axis of gaps: those differ far more between methods than
    between the runs of a method.
    """
    if len({row.get("dataset") for row in rows}) > 1:
        rows = [with_dataset(row) for row in rows]
    methods = sorted({row["method"] for row in rows}, key=panel_order)
    width = style.COLUMN if len(methods) == 1 else style.PAGE
    figure, axes = style.panels(len(methods), 3, width, 2.3, sharey=True)
    facts = {}
    for method, ax in zip(methods, axes, strict=True):
        own = [row for row in rows if row["method"] == method]
        look = method_look(method_name(method))
        facts[method] = draw_panel(ax, own, look.light)
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel("replay gap, MMD²")
        if style.leftmost(ax):
            ax.set_ylabel("downstream drop (points)")
    style.legend_below(figure, axes, "intervention (ρ: Spearman, with a 95 % bootstrap interval)")
    return figure, facts


def with_dataset(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its dataset in the name of its panel."""
    panel = f"{row['method']}, {row['dataset']}"
    return row | {"method": panel}


def method_name(panel: str) -> str:
    """The method in the name of a panel, which may have a dataset too."""
    return panel.partition(",")[0]


def panel_order(panel: str) -> tuple[Any, str]:
    """A sort key: methods in the order of the paper, then datasets by name."""
    return method_rank(method_name(panel)), panel


def draw_panel(ax: Axes, rows: Sequence[dict[str, Any]], colour: str) -> dict[str, Any]:
    """The runs of one method. Returns the fitted values; None if there are too few runs or they do not vary."""
    x = np.array([float(row["mmd2"]) for row in rows])
    y = np.array([float(row["drop"]) for row in rows])
    for strength, marker in MARKERS.items():
        chosen = np.array([row["strength"] == strength for row in rows])
        if chosen.any():
            look: dict[str, Any] = {"s": 18, "marker": marker}
            ax.scatter(x[chosen], y[chosen], color=colour, alpha=0.8, linewidths=0, **look)
            ax.scatter([], [], color="#444444", label=strength, **look)
    ax.axhline(0, color="#888888", linewidth=0.6)
    facts: dict[str, Any] = {"runs": len(x), "rho": None, "interval": None, "slope": None}
    text = "no correlation computed"
    rank = correlation(x, y)
    if rank is not None:
        rho, low, high = rank
        text = f"ρ = {rho:.2f} [{low:.2f}, {high:.2f}]"
        slope = draw_trend(ax, x, y)
        facts |= {"rho": rho, "interval": [low, high], "slope": slope}
    name, comma, dataset = rows[0]["method"].partition(",")
    count = "1 run" if len(x) == 1 else f"{len(x)} runs"
    ax.set_title(f"{method_title(name)}{comma}{dataset}, {count}\n{text}")
    return facts


def draw_trend(ax: Axes, x: np.ndarray, y: np.ndarray) -> float:
    """Draws the least-squares line; its slope."""
    slope, offset = np.polyfit(x, y, 1)
    ends = np.array([x.min(), x.max()])
    ax.plot(ends, slope * ends + offset, color="#222222", linewidth=1.0)
    return float(slope)


def correlation(x: np.ndarray, y: np.ndarray) -> list[float] | None:
    """Spearman's rho and its bootstrap interval; None if it cannot be computed."""
    from profcil.diagnostics.replay_gap import rank_correlation

    try:
        rho_and_interval = rank_correlation(x.tolist(), y.tolist(), seed=0)
    except DataError:
        return None
    return [round(float(value), 6) for value in rho_and_interval]
