"""The style of all figures: width of a column, legible in print, safe for the colour-blind, reproducible files."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.errors import ConfigError, RunFolderError
from profcil.reporting.groups import Group
from profcil.reporting.looks import method_look
from profcil.reporting.paper import method_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN = 3.4  # inches
PAGE = 7.0  # inches: two columns
# The palette of Okabe and Ito without yellow, which is hard to see on white paper.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"
LINES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)))
FORMATS = ("svg", "pdf", "png")
WITHOUT_DATE: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SMALL = 7  # points
NORMAL = 8
LINE_HEIGHT = 0.125  # inches, of small text
LONG_AXIS = 2.5  # powers of ten, beyond which ticks at every step would overlap
STYLE: dict[Any, Any] = {
    "font.size": NORMAL,
    "axes.titlesize": NORMAL,
    "axes.labelsize": NORMAL,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "legend.title_fontsize": SMALL,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.5,
    "figure.dpi": 150,
    "svg.hashsalt": "profcil",  # makes element ids reproducible; they are random otherwise
    "svg.fonttype": "path",  # independent of the fonts installed
    "pdf.fonttype": 42,
}


def look(number: int) -> dict[str, Any]:
    """Colour, marker and line style of a series; series differ without colour too."""
    rounds, colour = divmod(number, len(COLOURS))
    marker = MARKERS[number % len(MARKERS)]
    line = LINES[rounds % len(LINES)]
    return {"color": COLOURS[colour], "marker": marker, "linestyle": line}


def group_look(group: Group) -> dict[str, Any]:
    """Colour and marker of a group's method, the same in all figures; variants of it have other line styles."""
    found = method_look(group.method)
    line = LINES[group.variant % len(LINES)]
    return {"color": found.light, "marker": found.marker, "linestyle": line}


def panels(count: int, across: int, width: float, height: float, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in full rows, at most `across` side by side, each `height` inches high."""
    from matplotlib.figure import Figure

    rows = ceil(count / across)
    columns = ceil(count / rows)  # evenly filled: four panels are two by two, not three and one
    figure = Figure(figsize=(width, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def leftmost(axes: Axes) -> bool:
    """Whether a panel is the first of its row, which has the axis title."""
    spec = axes.get_subplotspec()
    return spec is not None and spec.is_first_col()


def dots(axes: Axes, points: np.ndarray, **look: Any) -> None:
    """Draws points [n, 2]. Without points nothing is drawn, and the legend gets no entry."""
    if len(points):
        axes.scatter(points[:, 0], points[:, 1], **look)


def folded(label: str, width: int) -> str:
    """A long label on several lines."""
    return "\n".join(wrap(label, width, break_long_words=False))


def row_height(labels: Sequence[str], least: float) -> float:
    """The height in inches of a row whose label may have several lines."""
    most = max((label.count("\n") + 1 for label in labels), default=1)
    return max(least, 0.03 + LINE_HEIGHT * most)


def to_list(values: np.ndarray) -> list[float | None]:
    """The values for JSON, with None in place of NaN."""
    rounded: list[float | None] = []
    for value in values:
        rounded.append(round(float(value), 4) if np.isfinite(value) else None)
    return rounded


def format_bytes(value: float) -> str:
    """A number of bytes with its unit, e.g. 20 MB."""
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def bytes_axis(axes: Axes, low: float, high: float, steps: Sequence[int] = (1, 2, 5)) -> None:
    """A logarithmic axis of bytes of at least a decade, with ticks at `steps` of the powers of ten. A long axis has
    ticks at powers of ten alone."""
    missing = max(0.0, 1.0 - np.log10(high / low)) / 2
    low /= 10**missing
    high *= 10**missing
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    long = np.log10(high / low) > LONG_AXIS
    ticks = [step * 10.0**power for power in powers for step in ((1,) if long else steps)]
    axes.set_xscale("log")
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.minorticks_off()
    axes.set_xlim(low, high)


def positions_axis(axes: Axes, count: int) -> None:
    """Ticks at whole positions from 1; with many positions at some of them only."""
    step = ceil(count / 10)
    axes.set_xticks(np.arange(1, count + 1, step))
    axes.set_xlim(0.8, count + 0.2)


def ordered_labels(groups: Sequence[Group]) -> list[str]:
    """The labels of groups of several streams, by method in the order of the paper."""
    ordered = sorted(groups, key=lambda group: (method_rank(group.method), group.variant))
    return list(dict.fromkeys(group.label for group in ordered))


def legend_below(
    figure: Figure, axes: Sequence[Axes], title: str | None = None, columns: int = 7, order: Sequence[str] = ()
) -> None:
    """One legend for all panels below them, with every label once. The figure grows by the height of the legend."""
    handle_by_label: dict[str, Any] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for label, handle in zip(labels, handles, strict=True):
            handle_by_label.setdefault(label, handle)
    if order:
        handle_by_label = {label: handle_by_label[label] for label in order if label in handle_by_label}
    longest = max(map(len, handle_by_label), default=1)
    column_width = 0.36 + 0.055 * longest  # inches
    fit = max(1, int(figure.get_figwidth() / column_width))
    count = len(handle_by_label)
    columns = max(1, min(columns, fit, count))
    lines = ceil(count / columns)
    columns = ceil(count / lines)  # evenly filled
    labels = by_column(list(handle_by_label), columns)
    if title is not None:
        lines += 1
    figure.set_figheight(figure.get_figheight() + 0.15 * lines + 0.1)
    handles = [handle_by_label[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title)


def by_column(labels: Sequence[str], columns: int) -> list[str]:
    """The labels in the order in which a legend is filled, column by column, so that they are read line by line."""
    return [label for first in range(columns) for label in labels[first::columns]]


def explain_below(figure: Figure, text: str) -> None:
    """What the marks mean, below the panels. The figure grows by its height."""
    lines = folded(text, int(15 * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.15 * (lines.count("\n") + 1))
    figure.supxlabel(lines, fontsize=SMALL, color="#555555")


def parse_formats(text: str) -> list[str]:
    """The formats in a comma-separated text, e.g. `svg,pdf`."""
    formats = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(f"format '{name}' is not supported; choose from {', '.join(FORMATS)}, e.g. svg,pdf")
    return formats


def save(figure: Figure, out: Path, name: str, formats: Sequence[str]) -> list[Path]:
    """Writes the figure in each format, without dates: the same runs give the same files. Returns the paths."""
    written: list[Path] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for kind in formats:
            path = out / f"{name}.{kind}"
            figure.savefig(path, format=kind, metadata=WITHOUT_DATE[kind], dpi=200)
            written.append(path)
    except OSError as error:
        raise RunFolderError(f"{out} cannot be written ({error.strerror}); choose another folder with --out") from None
    return written
