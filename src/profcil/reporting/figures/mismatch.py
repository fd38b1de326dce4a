"""Does a larger replay gap go with a larger downstream drop? Within each method, over seeds and strengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import DataError
from profcil.reporting.figures import inputs, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"mild": "o", "medium": "s", "severe": "^"}  # as in the paper


def mismatch(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """All runs of the studies given."""
    return drawn([row for path in paths for row in inputs.mismatch(Path(path))])


def drawn(rows: Sequence[dict[str, Any]]) -> tuple[Figure, dict[str, Any]]:
    """A panel per method (and dataset, of several) with its least-squares trend and Spearman's rho. Drops share an
    axis; gaps do not: methods differ by far more in them than a method's runs do."""
    several = len({row.get("dataset") for row in rows}) > 1
    rows = [row | {"method": f"{row['method']}, {row['dataset']}"} for row in rows] if several else rows
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = style.COLUMN if len(methods) == 1 else style.PAGE
    figure, axes = style.panels(len(methods), 3, width, 2.3, sharey=True)
    facts = {}
    for i, (method, ax) in enumerate(zip(methods, axes, strict=True)):
        own = [row for row in rows if row["method"] == method]
        facts[method] = panel(ax, own, style.COLOURS[i % len(style.COLOURS)])
        ax.locator_params(axis="x", nbins=5)
        ax.set_xlabel("replay gap, MMD²")
        if style.leftmost(ax):
            ax.set_ylabel("downstream drop (points)")
    style.legend_below(figure, axes, "intervention (ρ: Spearman, with a 95 % bootstrap interval)")
    return figure, facts


def panel(ax: Axes, rows: Sequence[dict[str, Any]], colour: str) -> dict[str, Any]:
    """One method's runs; what was fitted to them, None where there are too few or they do not vary."""
    x, y = (np.array([float(row[key]) for row in rows]) for key in ("mmd2", "drop"))
    for strength, marker in MARKERS.items():
        here = np.array([row["strength"] == strength for row in rows])
        if here.any():
            ax.scatter(x[here], y[here], s=18, marker=marker, color=colour, alpha=0.8, linewidths=0)
            ax.scatter([], [], s=18, marker=marker, color="#444444", label=strength)
    ax.axhline(0, color="#888888", linewidth=0.6)
    rank = correlation(x, y)
    slope = trend(ax, x, y) if rank else None
    told = f"ρ = {rank[0]:.2f} [{rank[1]:.2f}, {rank[2]:.2f}]" if rank else "no trend to tell"
    ax.set_title(f"{rows[0]['method']}, {len(x)} runs\n{told}")
    return {"runs": len(x), "rho": rank and rank[0], "interval": rank and rank[1:], "slope": slope}


def trend(ax: Axes, x: np.ndarray, y: np.ndarray) -> float:
    slope, offset = np.polyfit(x, y, 1)
    ends = np.array([x.min(), x.max()])
    ax.plot(ends, slope * ends + offset, color="#222222", linewidth=1.0)
    return float(slope)


def correlation(x: np.ndarray, y: np.ndarray) -> list[float] | None:
    """Spearman's rho and its bootstrap interval, where it can be had."""
    from profcil.diagnostics.replay_gap import rank_correlation

    try:
        return [round(float(v), 6) for v in rank_correlation(x.tolist(), y.tolist(), seed=0)]
    except DataError:
        return None
