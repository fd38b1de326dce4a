"""The confusion matrix of a trained model: how often each class is predicted as which."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import heatmap, style
from profcil.reporting.figures.inputs import invalid_file, unreadable_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ADVICE = "`profcil eval RUN --confusion FILE` writes it"
MOST_NAMES = 25  # with more classes than this their names are left out
NAME = 12  # characters of a name
Confusion = tuple[list[str], np.ndarray]  # the names of the classes, and the counts [class, predicted class]


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per file. A row is a class, its cells are the shares of predictions in percent."""
    found = {Path(path).stem: read_confusion(Path(path)) for path in paths}
    width = style.COLUMN if len(found) == 1 else style.PAGE
    figure, axes = style.panels(len(found), 2, width, 3.2)
    for (title, (names, counts)), ax in zip(found.items(), axes, strict=True):
        totals = counts.sum(1, keepdims=True)
        shares = np.divide(100.0 * counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
        image = heatmap.draw_cells(ax, shares)
        write_names(ax, names)
        ax.set(title=title, xlabel="predicted class", ylabel="class")
    heatmap.draw_scale(figure, image, axes, "share of the examples of a class (%)")
    return figure, {title: {"classes": names, "counts": counts.tolist()} for title, (names, counts) in found.items()}


def write_names(ax: Axes, names: Sequence[str]) -> None:
    if len(names) > MOST_NAMES:
        ax.set_xticks([])
        ax.set_yticks([])
        return
    short = [name if len(name) <= NAME else f"{name[: NAME - 1]}…" for name in names]
    turned = 90 if max(map(len, short)) > 2 else 0
    ax.set_xticks(range(len(short)), short, rotation=turned)
    ax.set_yticks(range(len(short)), short)


def read_confusion(path: Path) -> Confusion:
    """The matrix in a CSV file of `profcil eval`."""
    if path.is_dir():
        raise invalid_file(path, f"it is a folder, not a CSV file; {ADVICE}")
    try:
        with open(path, encoding="utf-8", newline="") as file:
            (_, *names), *lines = csv.reader(file)
        counts = np.array([[int(cell) for cell in cells] for _, *cells in lines])
    except OSError as error:
        raise unreadable_file(path, error, ADVICE) from None
    except ValueError:
        raise invalid_file(path, f"it must have a row of counts for each class; {ADVICE}") from None
    if counts.shape != (len(names), len(names)) or not names or (counts < 0).any():
        raise invalid_file(path, f"it must have a row and a column for each class; {ADVICE}")
    return names, counts
