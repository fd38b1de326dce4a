"""A table as data: rows of entries, each with a value per seed and the paper's value.

An entry without a finished run has no value. Its state says whether the run is missing or the method not applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from profcil.errors import RunFolderError
from profcil.registry import short_name
from profcil.reporting.paper import PaperValue, method_rank
from profcil.reporting.table_metrics import METRICS
from profcil.runs.settings_check import SEED_AND_MACHINE, flatten_settings


@dataclass(frozen=True)
class Item:
    """A planned run and its results."""

    config: Mapping[str, Any]  # nested plain settings
    variant: str = ""
    applicable: bool = True
    values: Mapping[str, float | None] | None = None  # None: the run is not finished
    label: str = ""  # settings that keep a row of a results store apart from others of its method
    stream: str = ""  # those of them that make another stream, whose results are not compared with the others

    @property
    def method(self) -> str:
        return short_name(self.config["method"])


@dataclass(frozen=True)
class Column:
    group: str  # a heading above several columns, or empty
    metric: str

    @property
    def title(self) -> str:
        return METRICS[self.metric].title


@dataclass
class TableEntry:
    """One entry of a table."""

    seeds: dict[int, float] = field(default_factory=dict)  # measured values
    ran: set[int] = field(default_factory=set)  # seeds with a finished run, also if it has no value here
    planned: set[int] = field(default_factory=set)
    applicable: bool = True
    paper: PaperValue | None = None
    repeated: int = 0  # number of values that were dropped because their seed already had one
    first: Item | None = None  # the first item of the entry

    @property
    def state(self) -> str:
        """`measured`, or why there is no value. A dash: a finished run has no such value, or no run was planned."""
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
        """The sample standard deviation; None for fewer than two seeds."""
        return stdev(self.seeds.values()) if len(self.seeds) > 1 else None


@dataclass
class Row:
    names: tuple[str, ...]
    method: str
    entries: dict[Column, TableEntry]
    stream: str = ""

    @property
    def block(self) -> tuple[str, ...]:
        """Rows of one block are compared with each other: their names differ only in the last part."""
        return (*self.names[:-1], self.stream)


@dataclass(frozen=True)
class TableLayout:
    """How planned runs are arranged in a table of the paper."""

    title: str
    studies: tuple[str, ...]
    heads: tuple[str, ...]  # headings of the leading columns
    names: Callable[[Item], tuple[str, ...]]  # texts of the leading columns; all but the last identify the block
    metrics: tuple[str, ...]
    group: Callable[[Item, str], str | None]  # the heading above a value's column; None leaves the value out
    paper: Callable[[Item, str], PaperValue | None]
    keep: Callable[[Item], bool] = lambda item: True
    by_method: bool = True  # rows are methods, in the order of the paper
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
        """Rows that are compared with each other."""
        found: dict[tuple[str, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.block, []).append(row)
        return list(found.values())


def build_table(layout: TableLayout, items: Iterable[Item]) -> Table:
    """The table: methods in the order of the paper, everything else in the order of the study."""
    rows: dict[tuple[str, ...], Row] = {}
    columns: dict[Column, None] = {}  # an ordered set
    for item in filter(layout.keep, items):
        names = labelled_names(layout, item)
        row = rows.setdefault(names, Row(names, item.method, {}, item.stream))
        for metric in layout.metrics:
            group = layout.group(item, metric)
            if group is not None:
                column = Column(group, metric)
                columns[column] = None
                entry = row.entries.setdefault(column, TableEntry(paper=layout.paper(item, metric)))
                add_item(entry, item, metric)
    if layout.tested:
        check_same_stream(rows.values())
    ordered_rows = order_rows(list(rows.values()), layout.by_method)
    note = f"{layout.note} {describe_repeated(ordered_rows)}".strip()
    ordered_columns = order_columns(list(columns))
    return Table(layout.title, layout.heads, ordered_columns, ordered_rows, layout.tested, note)


def labelled_names(layout: TableLayout, item: Item) -> tuple[str, ...]:
    """The texts of the leading columns, with the label of the item in the last one."""
    *block, name = layout.names(item)
    if item.label:
        name = f"{name} ({item.label})"
    return (*block, name)


def order_columns(columns: Sequence[Column]) -> list[Column]:
    """Columns of one group side by side, groups in the order of their first columns."""
    groups = list(dict.fromkeys(column.group for column in columns))
    return sorted(columns, key=lambda column: groups.index(column.group))


def order_rows(rows: Sequence[Row], by_method: bool) -> list[Row]:
    """Rows of one block below each other; within a block in the order of the paper, or as given."""
    blocks = list(dict.fromkeys(row.block for row in rows))

    def sort_key(row: Row) -> tuple[int, tuple[int, str]]:
        rank = method_rank(row.method) if by_method else (0, "")
        return blocks.index(row.block), rank

    return sorted(rows, key=sort_key)


def describe_repeated(rows: Sequence[Row]) -> str:
    """A sentence about values that were dropped because their seed already had one; empty if there are none."""
    repeated = sum(entry.repeated for row in rows for entry in row.entries.values())
    if not repeated:
        return ""
    return f"{repeated} values came from a second run of the same seed and are left out: the first is shown."


def add_item(entry: TableEntry, item: Item, metric: str) -> None:
    """Adds a planned run and its value to an entry. All runs of an entry must differ only in the seed."""
    entry.first = entry.first or item
    differing = differing_settings(entry.first.config, item.config)
    if differing:
        raise RunFolderError(
            f"runs of {item.method} on {item.config['dataset']} that belong to one entry differ in "
            f"{', '.join(differing)}; give runs that differ only in the seed, or use `profcil compare`"
        )
    seed = item.config["seed"]
    entry.planned.add(seed)
    entry.applicable = item.applicable
    if item.values is not None:
        entry.ran.add(seed)
    value = (item.values or {}).get(metric)
    if value is not None:
        entry.repeated += seed in entry.seeds
        entry.seeds.setdefault(seed, value)


def check_same_stream(rows: Iterable[Row]) -> None:
    """Refuses to compare methods, seed by seed, that ran on different streams."""
    firsts: dict[tuple, Item] = {}
    for row in rows:
        for column, entry in row.entries.items():
            assert entry.first is not None
            other = firsts.setdefault((row.block, column), entry.first)
            differing = differing_settings(other.config, entry.first.config)
            of_stream = [key for key in differing if is_of_stream(key)]
            if of_stream:
                raise RunFolderError(
                    f"runs of {other.method} and {row.method} on {other.config['dataset']} are not of one stream, they "
                    f"differ in {', '.join(of_stream)}; give runs of one stream, or use `profcil compare`"
                )


def is_of_stream(key: str) -> bool:
    """Whether a setting makes another stream."""
    return key.startswith("stream.") or key in ("evaluate", "setting")


def differing_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The settings in which two runs differ, except the seed and settings without effect on results."""
    a = flatten_settings(one)
    b = flatten_settings(other)
    ignored = (*SEED_AND_MACHINE, "regime")
    keys = (a.keys() | b.keys()) - set(ignored)
    return sorted(key for key in keys if a.get(key) != b.get(key))
