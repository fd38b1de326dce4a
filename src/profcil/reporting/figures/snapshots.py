"""Stored class means at several positions, all in one PCA: how the memory moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import ConfigError
from profcil.reporting.figures import inputs, style
from profcil.runs.gather import find_run_folders

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 4
LOOKS: dict[str, dict[str, Any]] = {
    "refreshed": {"color": "#E69F00", "marker": "D", "s": 22, "linewidths": 0},
    "stale": {"color": "#D55E00", "marker": "x", "s": 26, "linewidths": 0.9},
    "aligned": {"color": "#0072B2", "marker": "*", "s": 40, "linewidths": 0},
}


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """Panels for up to four positions of one run, spread evenly over its stream."""
    folders = find_run_folders(paths)
    if len(folders) != 1:
        raise ConfigError(f"{len(folders)} runs were given, this figure shows one; name one run folder")
    return draw_memory(inputs.read_snapshots(folders[0]))


def draw_memory(memory: dict[str, np.ndarray]) -> tuple[Figure, dict[str, Any]]:
    """A panel per position. All panels share one PCA, so that distances between panels are comparable."""
    (points, oracle, real), shares = shared_pca(memory["means"], memory["oracle"], memory["real"])
    positions = np.unique(memory["position"])
    panels = min(MAX_PANELS, len(positions))
    evenly = np.linspace(0, len(positions) - 1, panels)
    shown = positions[evenly.round().astype(int)]
    width = style.COLUMN if len(shown) == 1 else style.PAGE
    figure, axes = style.panels(len(shown), MAX_PANELS, width, 2.4, sharex=True, sharey=True)
    for position, ax in zip(shown, axes, strict=True):
        here = memory["position"] == position
        real_here = real[memory["real_position"] == position]
        style.dots(ax, real_here, s=4, color="#BBBBBB", linewidths=0, label="real feature")
        kinds = memory["kind"][here]
        labels = memory["labels"][here]
        draw_panel(ax, points[here], oracle[here], kinds, labels)
        ax.set_title(f"position {position + 1}")
        ax.set_xlabel(f"PC 1 ({shares[0]:.0f} %)")
    axes[0].set_ylabel(f"PC 2 ({shares[1]:.0f} %)")
    style.legend_below(figure, axes, columns=5)
    percent = np.round(shares, 4).tolist()
    return figure, {"explained_percent": percent, "positions": shown.tolist(), "gap": mean_gaps(memory)}


def shared_pca(*parts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Each part in the first two principal components of all rows together, and their percentages of variance."""
    pooled = np.concatenate(parts).astype(np.float64)
    centre = pooled.mean(axis=0)
    _, sizes, axes = np.linalg.svd(pooled - centre, full_matrices=False)
    largest = np.abs(axes).argmax(axis=1)
    signs = np.sign(axes[np.arange(len(axes)), largest])
    axes = axes * signs[:, None]  # the SVD leaves the signs open
    plane = np.zeros((2, pooled.shape[1]))
    plane[: min(2, len(axes))] = axes[:2]
    variances = np.append(sizes**2, [0.0, 0.0])  # two more, as there may be a single component
    total = max(variances.sum(), np.finfo(float).tiny)
    shares = 100 * variances[:2] / total
    return [(part - centre) @ plane.T for part in parts], shares


def draw_panel(ax: Axes, points: np.ndarray, oracle: np.ndarray, kind: np.ndarray, labels: np.ndarray) -> None:
    """True means as circles, stored means by kind, and a line from each stale mean to its aligned one."""
    style.dots(ax, oracle, s=44, facecolors="none", edgecolors="#888888", linewidths=0.6, label="true mean")
    for label in np.unique(labels[kind == "aligned"]):
        stale = points[(labels == label) & (kind == "stale")]
        aligned = points[(labels == label) & (kind == "aligned")]
        if len(stale) == len(aligned) == 1:
            x, y = np.concatenate([stale, aligned]).T
            ax.plot(x, y, color="#888888", linewidth=0.6, zorder=1)
    for name, look in LOOKS.items():
        if (kind == name).any():
            style.dots(ax, points[kind == name], label=name, **look)


def mean_gaps(memory: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean distance between stored and true mean, by kind; in the full space, not in the plane of the figure."""
    distances = np.linalg.norm(memory["means"].astype(float) - memory["oracle"], axis=1)
    gaps = {}
    for kind in inputs.KINDS:
        chosen = memory["kind"] == kind
        if chosen.any():
            gaps[kind] = round(float(distances[chosen].mean()), 6)
    return gaps
