"""Tables of runs, as plain rows and as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from profcil.reporting.groups import distinguishing_settings, label_of
from profcil.runs.gather import settings_without_seed
from profcil.runs.reader import Run, dataset_title, summarise_run

RESULT_COLUMNS = {
    "faa": "FAA",
    "cta": "CTA",
    "af": "AF",
    "bytes_down": "MB down",
    "bytes_up": "MB up",
    "seconds": "seconds",
}
MEASURED_COLUMNS = {
    "faa": "FAA",
    "cta": "CTA",
    "af": "AF",
    "norm_comm": "NormComm",
    "bytes_down": "MB down",
    "bytes_up": "MB up",
    "seconds": "seconds",
    "warmup_seconds": "warm-up s",
    "peak_memory_mb": "peak MB",
}
NAME_COLUMNS = {"method": "method", "dataset": "dataset", "setting": "setting", "seed": "seed"}
SPARED = ("peak MB", "warm-up s", "seconds", "MB up", "MB down", "NormComm")  # left out first on a narrow terminal
FOLD_WIDTHS = (24, 12)  # text in columns up to this many characters is not folded; the second if space is short
PADDING = 2  # characters between two columns


def compare(runs: Sequence[Run], reference: str = "fedavg") -> list[dict[str, Any]]:
    """A row per run, in the order given, with NormComm relative to the runs of the reference method among them."""
    rows = [summarise_run(run) for run in runs]
    references = []
    for run, row in zip(runs, rows, strict=True):
        if row["method"] == reference and row["bytes_total"] is not None:
            references.append((run, row))
    compared = []
    for run, row, settings in zip(runs, rows, distinguishing_settings(runs), strict=True):
        norm_comm = relative_traffic(run, row, references)
        compared.append({**row, "settings": settings, "norm_comm": norm_comm})
    return compared


def relative_traffic(
    run: Run, row: Mapping[str, Any], references: Sequence[tuple[Run, dict[str, Any]]]
) -> float | None:
    """NormComm: traffic relative to the reference's run with the same protocol and seed, else to its mean over seeds.

    None if there is no such run.
    """
    same_protocol = [other for reference, other in references if protocol(reference) == protocol(run)]
    same_seed = [other for other in same_protocol if other["seed"] == row["seed"]]
    chosen = [other["bytes_total"] for other in same_seed or same_protocol]
    mean = fmean(chosen) if chosen else 0
    if row["bytes_total"] is None or not mean:
        return None
    return row["bytes_total"] / mean


def protocol(run: Run) -> tuple[Any, ...]:
    """What two runs must share for their traffic to be comparable. The setting `transfer` may differ."""
    c = run.config
    sizes = dict(c["model"])
    for key in ("head", "precision"):
        sizes.pop(key, None)
    return (dataset_title(c), c["setting"], c["stream"], c["train"]["rounds"], sizes)


def render(runs: Sequence[Run], reference: str = "fedavg") -> str:
    """The comparison as text: all runs, then mean ± sample standard deviation of runs that differ only in the seed."""
    rows = compare(runs, reference)
    columns = NAME_COLUMNS | MEASURED_COLUMNS
    lines = []
    for row in rows:
        label = label_of(row["method"], row["settings"])
        lines.append(format_row(row | {"method": label}, columns))
    means = [format_mean(group) for group in seed_groups(runs, rows)]
    heading, header, cells = split_constant(list(columns.values()), [*lines, *means])
    table = text_table(header, cells, SPARED)
    return "\n".join([*heading, table, *execution_lines(rows)])


def split_constant(header: list[str], lines: list[list[str]]) -> tuple[list[str], list[str], list[list[str]]]:
    """On a terminal, dataset and setting as a heading if all lines have the same, and the other columns."""
    shared = {}
    for name in ("dataset", "setting"):
        values = {line[header.index(name)] for line in lines}
        if len(values) == 1 and sys.stdout.isatty():
            shared[name] = values.pop()
    kept = [number for number, name in enumerate(header) if name not in shared]
    cells = [[line[number] for number in kept] for line in lines]
    heading = [", ".join(shared.values())] if shared else []
    titles = [header[number] for number in kept]
    return heading, titles, cells


def execution_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which code computed each run, if the runs differ in it; nothing otherwise."""
    different = {row["computed"] for row in rows if row["computed"]}
    if len(different) < 2:
        return []
    lines = []
    for row in rows:
        computed = row["computed"] or "not recorded"
        lines.append(f"  {row['path']}: {computed}")
    return ["", "The runs were computed in different ways:", *lines]


def seed_groups(runs: Sequence[Run], rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of finished runs that differ only in the seed, if there are at least two seeds."""
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for run, row in zip(runs, rows, strict=True):
        if row["done"]:
            by_seed = groups.setdefault(settings_without_seed(run), {})
            by_seed.setdefault(row["seed"], row)
    return [list(by_seed.values()) for by_seed in groups.values() if len(by_seed) > 1]


def format_mean(group: Sequence[Mapping[str, Any]]) -> list[str]:
    """The texts of a row of means over seeds. A value that one of the seeds lacks is not averaged."""
    texts = []
    for key in MEASURED_COLUMNS:
        values = [row[key] for row in group]
        if any(value is None for value in values):
            texts.append("-")
        else:
            mean = format_value(key, fmean(values))
            deviation = format_value(key, stdev(values))
            texts.append(f"{mean} ± {deviation}")
    first = group[0]
    label = label_of(first["method"], first["settings"])
    return [label, first["dataset"], first["setting"], f"mean of {len(group)}", *texts]


def format_row(row: Mapping[str, Any], columns: Mapping[str, str]) -> list[str]:
    """The texts of a row. An unfinished run has `unfinished` in place of its FAA."""
    texts = [format_value(key, row[key]) for key in columns]
    if not row["done"]:
        texts[list(columns).index("faa")] = "unfinished"
    return texts


def format_value(key: str, value: Any) -> str:
    if value is None:
        return "-"
    if key.startswith("bytes"):
        return f"{value / 1e6:.2f}"
    if key == "norm_comm":
        return f"{value:.3f}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], spared: Sequence[str] = ()) -> str:
    """Aligned columns. In a pipe nothing is folded or left out.

    On a terminal long texts are folded to its width. Where that does not suffice, columns of `spared` are left out, in
    that order, and a line below the table names them.
    """
    if not sys.stdout.isatty():
        return draw_table(header, rows, None)
    from rich.console import Console

    width = Console().width
    columns = list(zip(header, *rows, strict=True))
    left_out: list[str] = []
    for name in spared:
        if table_width(columns, FOLD_WIDTHS[-1]) > width and name in header:
            columns = [cells for cells in columns if cells[0] != name]
            left_out.append(name)
    first, *others = zip(*columns, strict=True)
    table = draw_table(first, others, width)
    note = f"\nnot shown: {', '.join(left_out)}; see --json"
    return table + note if left_out else table


def table_width(columns: Sequence[Sequence[str]], fold_width: int) -> int:
    """The width of a table whose texts are folded to this many characters. Numbers are not folded."""
    widths = [column_width(cells, fold_width) for cells in columns]
    return sum(widths) + PADDING * (len(columns) - 1)


def column_width(cells: Sequence[str], fold_width: int) -> int:
    """The least width of a column: that of a column of numbers, with their deviations, is its whole width."""
    whole = max(map(len, cells))
    beginnings = [text[:1] for text in cells[1:]]
    is_number = all(first in ("", "-") or first.isdigit() for first in beginnings)
    return whole if is_number else min(fold_width, whole)


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """The table in this many characters if that is possible by folding texts; None: as wide as it needs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(header, *rows, strict=True))
    fits = width is None or table_width(columns, FOLD_WIDTHS[0]) <= width
    fold_width = FOLD_WIDTHS[0] if fits else FOLD_WIDTHS[1]
    table = Table(box=None, pad_edge=False, padding=(0, PADDING, 0, 0))
    for cells in columns:
        least = column_width(cells, fold_width)
        table.add_column(Text(cells[0]), overflow="fold", min_width=least)
    for texts in rows:
        table.add_row(*map(Text, texts))
    longest = max(len(text) for cells in columns for text in cells)
    needed = table_width(columns, longest if width is None else fold_width)
    console = Console(file=io.StringIO(), color_system=None, width=max(width or 0, needed))
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
