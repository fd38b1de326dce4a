"""The ranking of the methods: FAA of every seed, mean and deviation, and paired tests against the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from profcil.reporting.figures import style
from profcil.reporting.groups import load_groups
from profcil.reporting.paper import stream_title
from profcil.reporting.ranking import Standing, faa_by_seed, rank_groups
from profcil.reporting.tables import compare
from profcil.runs.reader import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.24  # inches
STARS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
EXPLANATION = (
    "small marks: seeds; bar: ± one standard deviation; difference from the best (paired t-test over common seeds, "
    "Holm): * p < 0.05, ** p < 0.01, *** p < 0.001, n.s. not significant, – fewer than three seeds"
)


def draw(paths: Sequence[str], warn: Callable[[str], None]) -> tuple[Figure, dict[str, Any]]:
    """A panel per stream, a row per method, the best above."""
    groups = load_groups(paths, warn, with_scores=False)
    runs: list[Run] = [run for group in groups for run in group.runs]
    ids = [id(run) for run in runs]
    rows = dict(zip(ids, compare(runs), strict=True))
    rankings = with_several(rank_groups(groups, rows))
    most = max(len(standings) for standings in rankings.values())
    width = style.COLUMN if len(rankings) == 1 else style.PAGE
    labels = {stream: [style.folded(one.group.label, 26) for one in own] for stream, own in rankings.items()}
    row = max(style.row_height(own, ROW) for own in labels.values())
    figure, axes = style.panels(len(rankings), 2, width, 0.75 + row * most)
    numbers: dict[str, dict[str, Any]] = {}
    for (stream, standings), ax in zip(rankings.items(), axes, strict=True):
        numbers[stream] = {}
        for place, one in enumerate(standings):
            by_seed = faa_by_seed(one.group, rows)
            draw_row(ax, place, one, by_seed)
            numbers[stream][one.group.label] = describe(one, by_seed)
        ax.set_yticks(range(len(standings)), labels[stream])
        ax.set(title=stream_title(stream), xlabel="final average accuracy (%)", xlim=(0, 100))
        ax.set_ylim(most - 0.5, -0.5)  # rows of all panels have the same height
        ax.tick_params(axis="y", length=0)
    style.explain_below(figure, EXPLANATION)
    return figure, numbers


def with_several(rankings: dict[str, list[Standing]]) -> dict[str, list[Standing]]:
    """The streams with several groups; all if there is none, since one group has no rank."""
    several = {stream: standings for stream, standings in rankings.items() if len(standings) > 1}
    return several or rankings


def draw_row(ax: Axes, place: int, one: Standing, by_seed: dict[int, float]) -> None:
    """Mean, deviation, seeds and the mark of the test of one group."""
    look = style.group_look(one.group)
    colour = look["color"]
    value = one.values["faa"]
    if value is None:
        return
    ax.plot(list(by_seed.values()), [place] * len(by_seed), "|", color=colour, alpha=0.6, markersize=6, clip_on=False)
    filling = "white" if one.group.variant else colour
    mean = {"color": colour, "marker": look["marker"], "markerfacecolor": filling, "markersize": 5, "zorder": 3}
    ax.errorbar(value.mean, place, xerr=value.sd, elinewidth=0.9, capsize=2, clip_on=False, **mean)
    if place:
        ax.annotate(mark(one.p), (1.0, place), xycoords=("axes fraction", "data"), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=style.SMALL, annotation_clip=False)  # fmt: skip


def mark(p: float | None) -> str:
    """Stars for a difference, `n.s.` without one, a dash if seeds are too few."""
    if p is None:
        return "–"
    for limit, stars in STARS:
        if p < limit:
            return stars
    return "n.s."


def describe(one: Standing, by_seed: dict[int, float]) -> dict[str, Any]:
    """The numbers behind a row."""
    value = one.values["faa"]
    mean = None if value is None else value.mean
    sd = None if value is None else value.sd
    return {"mean": mean, "sd": sd, "seeds": {str(seed): faa for seed, faa in by_seed.items()}, "p": one.p}
