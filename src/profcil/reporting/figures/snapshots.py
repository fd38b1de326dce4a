"""How the memory moves: remembered class means at several positions, all in one PCA."""

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

MOST = 4  # panels
LOOK: dict[str, dict[str, Any]] = {
    "refreshed": {"color": "#E69F00", "marker": "D", "s": 22},
    "stale": {"color": "#D55E00", "marker": "x", "s": 26},
    "aligned": {"color": "#0072B2", "marker": "*", "s": 40},
}


def snapshots(paths: Sequence[str], tell: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """Panels for up to four positions of one run, spread over its stream."""
    given = find_run_folders(paths)
    if len(given) != 1:
        raise ConfigError(f"{len(given)} runs were given, this figure shows one; name one run folder")
    return drawn(inputs.snapshots(given[0]))


def drawn(memory: dict[str, np.ndarray]) -> tuple[Figure, dict[str, Any]]:
    """One PCA for all panels, so that distances between panels mean something."""
    (points, oracle, real), shares = shared_pca(memory["means"], memory["oracle"], memory["real"])
    there = np.unique(memory["position"])
    shown = there[np.linspace(0, len(there) - 1, min(MOST, len(there))).round().astype(int)]
    width = style.COLUMN if len(shown) == 1 else style.PAGE
    figure, axes = style.panels(len(shown), MOST, width, 2.4, sharex=True, sharey=True)
    for position, ax in zip(shown, axes, strict=True):
        here = memory["position"] == position
        style.dots(
            ax, real[memory["real_position"] == position], s=4, color="#BBBBBB", linewidths=0, label="real feature"
        )
        panel(ax, points[here], oracle[here], memory["kind"][here], memory["labels"][here])
        ax.set_title(f"position {position + 1}")
        ax.set_xlabel(f"PC 1 ({shares[0]:.0f} %)")
    axes[0].set_ylabel(f"PC 2 ({shares[1]:.0f} %)")
    style.legend_below(figure, axes, columns=5)
    facts = {"explained_percent": np.round(shares, 4).tolist(), "positions": shown.tolist(), "gap": gaps(memory)}
    return figure, facts


def shared_pca(*parts: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Each part in the first two principal components of all rows together, and the percent of variance of each."""
    pooled = np.concatenate(parts).astype(np.float64)
    centre = pooled.mean(axis=0)
    _, sizes, axes = np.linalg.svd(pooled - centre, full_matrices=False)
    axes = axes * np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]  # a sign is arbitrary
    plane = np.zeros((2, pooled.shape[1]))
    plane[: min(2, len(axes))] = axes[:2]
    power = np.append(sizes**2, [0.0, 0.0])
    return [(part - centre) @ plane.T for part in parts], 100 * power[:2] / max(power.sum(), np.finfo(float).tiny)


def panel(ax: Axes, points: np.ndarray, oracle: np.ndarray, kind: np.ndarray, labels: np.ndarray) -> None:
    """True means as circles, memories by kind, and a line from where an old memory was to where it was moved."""
    style.dots(ax, oracle, s=44, facecolors="none", edgecolors="#888888", linewidths=0.6, label="true mean")
    for label in np.unique(labels[kind == "aligned"]):
        ends = [points[(labels == label) & (kind == k)] for k in ("stale", "aligned")]
        if all(len(e) == 1 for e in ends):
            ax.plot(*np.concatenate(ends).T, color="#888888", linewidth=0.6, zorder=1)
    for name, look in LOOK.items():
        if (kind == name).any():
            style.dots(ax, points[kind == name], label=name, linewidths=0.9 if look["marker"] == "x" else 0, **look)


def gaps(memory: dict[str, np.ndarray]) -> dict[str, float]:
    """The mean distance from the true mean by kind, in the full space: what the picture shows a shadow of."""
    far = np.linalg.norm(memory["means"].astype(float) - memory["oracle"], axis=1)
    there = [k for k in inputs.KINDS if (memory["kind"] == k).any()]
    return {k: round(float(far[memory["kind"] == k].mean()), 6) for k in there}
