"""Accuracy against traffic: FAA over the bytes of the stream on a logarithmic axis, a panel per stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.reporting.figures import style
from profcil.reporting.groups import load_groups
from profcil.reporting.paper import stream_title
from profcil.reporting.ranking import Standing, rank_runs
from profcil.runs.reader import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 2.6  # inches
LABEL_WIDTH = 22  # characters; longer labels are folded
CHARACTER = 4.5  # points that a character of a label takes
LINE = 8.0  # points that a line of a label takes
GAP = 5.0  # points between a marker and its label
POINTER: dict[str, Any] = {"arrowstyle": "-", "lw": 0.5, "shrinkA": 1, "shrinkB": 3}  # from a label to its point
Box = tuple[float, float, float, float]  # left, bottom, right, top in points


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A point per method with its deviation over seeds, labelled with its name."""
    groups = load_groups(paths, warn, with_scores=False)
    runs: list[Run] = [run for group in groups for run in group.runs]
    rankings = {stream: with_traffic(standings) for stream, standings in rank_runs(runs).items()}
    width = style.COLUMN if len(rankings) == 1 else style.PAGE
    figure, axes = style.panels(len(rankings), 2, width, HEIGHT, sharey=True)
    for (stream, standings), ax in zip(rankings.items(), axes, strict=True):
        draw_points(ax, standings)
        ax.set_title(stream_title(stream))
        ax.set_xlabel("bytes sent in the stream, both directions")
        ax.set_ylim(0, 100)
        if style.leftmost(ax):
            ax.set_ylabel("final average accuracy (%)")
    figure.draw_without_rendering()  # sizes of the panels are known from here on
    for standings, ax in zip(rankings.values(), axes, strict=True):
        write_labels(ax, standings)
    numbers = {}
    for stream, standings in rankings.items():
        numbers[stream] = {one.group.label: describe(one) for one in standings}
    return figure, numbers


def with_traffic(standings: Sequence[Standing]) -> list[Standing]:
    """Those whose bytes are known; not of some imported rows."""
    return [one for one in standings if one.values["bytes_total"] is not None]


def describe(one: Standing) -> dict[str, Any]:
    """The numbers behind a point."""
    seeds = [run.config["seed"] for run in one.group.runs]
    found: dict[str, Any] = {"seeds": seeds}
    for name in ("faa", "bytes_total", "norm_comm"):
        value = one.values[name]
        found[name] = None if value is None else {"mean": value.mean, "sd": value.sd}
    return found


def point_of(one: Standing) -> tuple[float, float]:
    """Bytes and FAA, means over seeds."""
    traffic = one.values["bytes_total"]
    accuracy = one.values["faa"]
    assert traffic is not None and accuracy is not None
    return traffic.mean, accuracy.mean


def draw_points(ax: Axes, standings: Sequence[Standing]) -> None:
    """The points with error bars of one standard deviation, on an axis of bytes with space for labels."""
    for one in standings:
        look = style.group_look(one.group) | {"linestyle": "none"}
        x, y = point_of(one)
        faa = one.values["faa"]
        deviation = faa.sd if faa is not None else None
        look |= {"markersize": 5, "zorder": 3, "alpha": 0.9, "clip_on": False}
        if one.group.variant > 0:
            look["markerfacecolor"] = "white"
        ax.errorbar(x, y, yerr=deviation, elinewidth=0.7, capsize=1.5, **look)
    traffic = [point_of(one)[0] for one in standings]
    low = min(traffic)
    high = max(traffic)
    decades = max(1.0, np.log10(high / low))
    room_left = 10 ** (0.12 * decades)
    room_right = 10 ** (0.28 * decades)
    style.bytes_axis(ax, low / room_left, high * room_right)


def write_labels(ax: Axes, standings: Sequence[Standing]) -> None:
    """Writes each name beside its point, where no other name or point is; with a line to it if it is far."""
    scale = 72 / ax.figure.dpi
    points = [ax.transData.transform(point_of(one)) * scale for one in standings]
    taken = [box_around(x, y, 3.0) for x, y in points]
    panel = np.array(ax.get_window_extent().extents)
    left, bottom, right, top = panel * scale
    bounds = (left, bottom, right, top)
    for one, (x, y) in zip(standings, points, strict=True):
        text = style.folded(one.group.label, LABEL_WIDTH)
        box, side = place(text, x, y, taken, bounds)
        taken.append(box)
        left, bottom, right, top = box
        across = left - x if side == "left" else right - x
        up = (bottom + top) / 2 - y
        colour = style.group_look(one.group)["color"]
        line = POINTER | {"color": colour} if abs(up) > LINE else None
        look = {"ha": side, "va": "center", "color": colour, "fontsize": style.SMALL, "arrowprops": line}
        note = ax.annotate(text, point_of(one), xytext=(across, up), textcoords="offset points", **look)
        note.set_in_layout(False)


def place(text: str, x: float, y: float, taken: Sequence[Box], bounds: Box) -> tuple[Box, str]:
    """The free place for a label that is nearest to its point; beside the point if there is none."""
    lines = text.split("\n")
    longest = max(map(len, lines))
    size = (CHARACTER * longest, LINE * len(lines))
    options = list(places(x, y, size))
    for box, side in options:
        if is_inside(box, bounds) and not any(overlap(box, other) for other in taken):
            return box, side
    return options[0]


def places(x: float, y: float, size: tuple[float, float]) -> Iterator[tuple[Box, str]]:
    """Places to the right and to the left of a point, ever further up and down."""
    width, height = size
    for step in range(16):
        for way in (1, -1) if step else (1,):
            bottom = y + way * step * LINE / 2 - height / 2
            top = bottom + height
            away = GAP + 2.0 if step > 1 else GAP
            right = x + away
            yield (right, bottom, right + width, top), "left"
            left = x - away
            yield (left - width, bottom, left, top), "right"


def box_around(x: float, y: float, half: float) -> Box:
    return x - half, y - half, x + half, y + half


def is_inside(box: Box, bounds: Box) -> bool:
    left, bottom, right, top = box
    inside_across = left >= bounds[0] and right <= bounds[2]
    inside_up = bottom >= bounds[1] and top <= bounds[3]
    return inside_across and inside_up


def overlap(one: Box, other: Box) -> bool:
    left, bottom, right, top = one
    overlap_across = left < other[2] and other[0] < right
    overlap_up = bottom < other[3] and other[1] < top
    return overlap_across and overlap_up
