"""A table as data: rows of entries, each with a value per seed and the paper's figure beside it.

Nothing is filled in: an entry without a finished run stays without a value, and says whether a run is missing or the
method has no meaning there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from profcil.errors import RunFolderError
from profcil.reporting import paper
from profcil.reporting.paper import Figure
from profcil.reporting.tables import compare
from profcil.runs.reader import Run, read_final_alignment
from profcil.runs.settings_check import SEED_AND_MACHINE, flatten_settings

# metric → heading, digits, and whether more (1) or less (-1) is better; 0 where neither is
METRICS: dict[str, tuple[str, int, int]] = {
    "comm": ("NormComm", 3, -1),
    "faa": ("FAA", 2, 1),
    "cta": ("CTA", 2, 1),
    "af": ("AF", 2, -1),
    "weak_accuracy": ("A post", 2, 1),
    "mmd2": ("MMD²", 3, -1),
    "w1": ("W1", 3, -1),
    "cosine": ("cos. dist.", 3, -1),
    "drop": ("drop", 2, -1),
    "align": ("Align u", 3, 1),
    "align_z": ("Align z", 3, 1),
    "centred": ("centred u", 3, 1),
    "mb_down": ("S→C MB", 2, -1),
    "mb_up": ("C→S MB", 2, -1),
    "seconds": ("stream s", 1, -1),
    "warmup_seconds": ("warm-up s", 1, 0),
    "total_seconds": ("total s", 1, -1),
    "peak_memory_mb": ("peak MB", 0, -1),
    "server_mb": ("server MB", 3, -1),
    "client_mb": ("client MB", 3, -1),
}
TESTED = ("faa", "cta", "af")


@dataclass(frozen=True)
class Item:
    """A planned run: what it is, and what came of it."""

    config: Mapping[str, Any]  # nested plain settings
    variant: str = ""
    applicable: bool = True
    values: Mapping[str, float | None] | None = None  # None: there is no finished run

    @property
    def method(self) -> str:
        return self.config["method"]


@dataclass(frozen=True)
class Column:
    group: str  # a heading over several columns, or nothing
    metric: str

    @property
    def title(self) -> str:
        return METRICS[self.metric][0]


@dataclass
class Entry:
    """One place of a table."""

    seeds: dict[int, float] = field(default_factory=dict)  # what was measured
    ran: set[int] = field(default_factory=set)  # seeds whose run is finished; it may have nothing to measure here
    planned: set[int] = field(default_factory=set)
    applicable: bool = True
    paper: Figure | None = None
    twice: int = 0  # values of a seed that had one already
    first: Item | None = None  # the first of them

    @property
    def state(self) -> str:
        """`measured`, or why there is no value; an entry that nothing was planned for is a dash like one that a
        finished run has no value for."""
        if self.seeds:
            return "measured"
        if not self.applicable:
            return "not applicable"
        return "-" if self.ran or not self.planned else "missing"

    @property
    def mean(self) -> float | None:
        return fmean(self.seeds.values()) if self.seeds else None

    @property
    def spread(self) -> float | None:
        """The sample standard deviation; of one seed there is none."""
        return stdev(self.seeds.values()) if len(self.seeds) > 1 else None


@dataclass
class Row:
    names: tuple[str, ...]
    method: str
    entries: dict[Column, Entry]


@dataclass(frozen=True)
class Layout:
    """How planned runs become a table of the paper."""

    title: str
    studies: tuple[str, ...]
    heads: tuple[str, ...]  # of the leading columns
    names: Callable[[Item], tuple[str, ...]]  # their texts; the last one names the row, the others its block
    metrics: tuple[str, ...]
    group: Callable[[Item, str], str | None]  # over which heading a value goes; None leaves it out
    paper: Callable[[Item, str], Figure | None]
    keep: Callable[[Item], bool] = lambda item: True
    by_method: bool = True  # rows are methods and stand in the paper's order
    tested: bool = True
    note: str = ""


@dataclass
class Table:
    title: str
    heads: tuple[str, ...]
    columns: list[Column]
    rows: list[Row]
    tested: bool
    note: str = ""

    def blocks(self) -> list[list[Row]]:
        """Rows that are compared with each other: those that differ in the last name only."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.names[:-1], []).append(row)
        return list(found.values())


def build(layout: Layout, items: Iterable[Item]) -> Table:
    """The table, methods in the paper's order, everything else in the order of the study."""
    rows: dict[tuple[str, ...], Row] = {}
    columns: dict[tuple[str, str], Column] = {}
    for item in filter(layout.keep, items):
        row = rows.setdefault(layout.names(item), Row(layout.names(item), item.method, {}))
        for metric in layout.metrics:
            group = layout.group(item, metric)
            if group is not None:
                column = columns.setdefault((group, metric), Column(group, metric))
                enter(row.entries.setdefault(column, Entry(paper=layout.paper(item, metric))), item, metric)
    if layout.tested:
        check_streams(rows.values())
    ordered = sorted(columns.values(), key=lambda c: list(dict.fromkeys(g for g, _ in columns)).index(c.group))
    blocks = list(dict.fromkeys(names[:-1] for names in rows))
    rank = paper.rank if layout.by_method else lambda method: (0, "")
    placed = sorted(rows.values(), key=lambda r: (blocks.index(r.names[:-1]), rank(r.method)))
    twice = sum(e.twice for row in placed for e in row.entries.values())
    note = f"{twice} values came from a second run of the same seed and are left out: the first is shown."
    return Table(
        layout.title, layout.heads, ordered, placed, layout.tested, f"{layout.note} {note if twice else ''}".strip()
    )


def enter(entry: Entry, item: Item, metric: str) -> None:
    entry.first = entry.first or item
    if apart := differing(entry.first.config, item.config):
        raise RunFolderError(
            f"runs of {item.method} on {item.config['dataset']} that would be seeds of one entry differ in "
            f"{', '.join(apart)}; give runs that differ in nothing but the seed, or look at them with `profcil compare`"
        )
    entry.planned.add(item.config["seed"])
    entry.applicable = item.applicable
    if item.values is not None:
        entry.ran.add(item.config["seed"])
    value = (item.values or {}).get(metric)
    if value is not None:
        entry.twice += item.config["seed"] in entry.seeds
        entry.seeds.setdefault(item.config["seed"], value)


def check_streams(rows: Iterable[Row]) -> None:
    """Methods that are compared, seed by seed, must have seen the same."""
    seen: dict[tuple, Item] = {}
    for row in rows:
        for column, entry in row.entries.items():
            assert entry.first is not None
            other = seen.setdefault((row.names[:-1], column), entry.first)
            apart = differing(other.config, entry.first.config)
            if stream := [k for k in apart if k.startswith("stream.") or k in ("evaluate", "setting")]:
                raise RunFolderError(
                    f"runs of {other.method} and {row.method} on {other.config['dataset']} are not of one stream, they "
                    f"differ in {', '.join(stream)}; give runs of one, or look at them with `profcil compare`"
                )


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Which settings of two runs differ, beyond the seed and what no result depends on."""
    a, b = flatten_settings(dict(one)), flatten_settings(dict(other))
    return sorted(k for k in a.keys() | b.keys() if k not in (*SEED_AND_MACHINE, "regime") and a.get(k) != b.get(k))


def measured(runs: Sequence[Run]) -> list[dict[str, float | None]]:
    """What finished runs came to, under the names of METRICS; NormComm among runs of one accounting."""
    rows: dict[Path, dict[str, Any]] = {}
    for transfer in dict.fromkeys(run.config["transfer"] for run in runs):
        same = [run for run in runs if run.config["transfer"] == transfer]
        rows |= {run.path: r for run, r in zip(same, compare(same, paper.figures()["reference"]), strict=True)}
    return [values(run, rows[run.path]) for run in runs]


def values(run: Run, row: Mapping[str, Any]) -> dict[str, float | None]:
    def mega(key: str) -> float | None:
        return row[key] / 1e6 if row[key] is not None else None

    final = read_final_alignment(run.path)
    stream, warm = row["seconds"], row["warmup_seconds"]
    return {
        **{key: row[key] for key in ("faa", "cta", "af", "seconds", "warmup_seconds", "peak_memory_mb")},
        "total_seconds": stream + warm if stream is not None and warm is not None else None,
        "comm": row["norm_comm"],
        "mb_down": mega("bytes_down"),
        "mb_up": mega("bytes_up"),
        "server_mb": mega("server_memory_bytes"),
        "client_mb": mega("client_extra_bytes"),
        "align": final.get("memory", {}).get("align"),
        "centred": final.get("memory", {}).get("centred"),
        "align_z": final.get("adapted", {}).get("align"),
    }
