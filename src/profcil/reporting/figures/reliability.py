"""Reliability diagrams: how often the predictions of a deployed model are right, against the probability that it gives.

Classes with few training examples have a line of their own. The models are run on the data that the runs were scored
on, which must be where the runs found them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from profcil.errors import RunFolderError
from profcil.reporting.figures import style
from profcil.reporting.groups import Group, load_groups
from profcil.reporting.paper import stream_title
from profcil.runs.results.stored_run import StoredRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

FEW = 5  # training examples, up to which a class has few
PARTS = ((f"up to {FEW} training examples", 1, FEW), (f"more than {FEW}", FEW + 1, float("inf")))


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per method, the predictions of all its seeds together."""
    groups = [group for group in load_groups(paths, warn, with_scores=False) if has_models(group, warn)]
    if not groups:
        raise RunFolderError("a reliability diagram needs run folders with their models; give folders, not a store")
    figure, axes = style.panels(len(groups), 3, style.PAGE, 2.4)
    numbers: dict[str, Any] = {}
    for group, ax in zip(groups, axes, strict=True):
        parts = numbers.setdefault(stream_title(group.stream), {})[group.label] = describe(group)
        draw_panel(ax, parts)
        ax.set_title(style.folded(group.label, 30))
    style.legend_below(figure, axes, "classes with")
    return figure, numbers


def has_models(group: Group, warn: Callable[[str], None]) -> bool:
    """Whether the runs of a group are folders. Rows of a store have no models."""
    stored = any(isinstance(run, StoredRun) for run in group.runs)
    if stored:
        warn(f"left out: {group.label} is a row of a results store, which has no model")
    return not stored


def describe(group: Group) -> dict[str, Any]:
    """The bins and the calibration error of each part, over all seeds."""
    import torch

    from profcil.runs.models.evaluation import calibration_error, evaluate_run, reliability

    evaluations = [evaluate_run(run.path) for run in group.runs]
    parts: dict[str, Any] = {}
    for title, low, high in PARTS:
        chosen = [one.with_support(low, high) for one in evaluations]
        probabilities: Tensor = torch.cat([one.probabilities for one in chosen])
        y = torch.cat([one.y for one in chosen])
        if len(y):
            error = calibration_error(probabilities, y)
            parts[title] = {"calibration_error": error, "bins": reliability(probabilities, y)}
    return parts


def draw_panel(ax: Axes, parts: dict[str, Any]) -> None:
    """The bins of each part beside the diagonal, the larger the more examples, and the calibration errors."""
    ax.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=style.LINES[2])
    errors = []
    for number, (title, part) in enumerate(parts.items()):
        x = [b["probability"] for b in part["bins"]]
        y = [b["accuracy"] for b in part["bins"]]
        most = max(b["examples"] for b in part["bins"])
        size = [4 + 26 * b["examples"] / most for b in part["bins"]]
        look = style.look(number)
        ax.plot(x, y, linewidth=0.7, alpha=0.6, color=look["color"])
        ax.scatter(x, y, size, label=title, color=look["color"], marker=look["marker"], zorder=3, clip_on=False)
        errors.append(f"ECE {100 * part['calibration_error']:.1f} % ({title})")
    text = "\n".join(errors)
    ax.text(0.98, 0.02, text, transform=ax.transAxes, va="bottom", ha="right", fontsize=style.SMALL)
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="predicted probability")
    if style.leftmost(ax):
        ax.set_ylabel("accuracy")
