"""Tables of runs, as plain rows and as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import fmean, stdev
from typing import Any

from profcil.protocol.settings import StreamSettings
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
FURTHER_COLUMNS = {"worst_client": "worst client", "client_sd": "client sd", "bwt": "BWT", "fwt": "FWT"}
OCCASIONAL_COLUMNS = {"epsilon": "ε", "dropped": "dropped", "simulated_seconds": "simulated s"}  # if a run has them
NAME_COLUMNS = {"method": "method", "dataset": "dataset", "setting": "setting", "seed": "seed"}
SPARED = ("peak MB", "warm-up s", "seconds", "MB up", "MB down", "NormComm")  # left out first on a narrow terminal
FOLD_WIDTH = 12  # columns of text are folded to this many characters at most
STREAM_DEFAULTS = {field.name: field.default for field in fields(StreamSettings)}
WORD_WIDTH = 24  # words of up to this many characters are not broken
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
    """What two runs must share for their traffic to be comparable. The setting `transfer` may differ.

    A setting of the stream that did not exist when a run was made has its default.
    """
    c = run.config
    stream = STREAM_DEFAULTS | c["stream"]
    sizes = dict(c["model"])
    for key in ("head", "precision"):
        sizes.pop(key, None)
    return (dataset_title(c), c["setting"], stream, c["train"]["rounds"], sizes)


def render(runs: Sequence[Run], reference: str = "fedavg", further: bool = False) -> str:
    """The comparison as text: all runs, then mean ± sample standard deviation of runs that differ only in the seed.

    `further` also shows the worst client, the deviation over clients, and transfer.
    """
    heading, header, cells = split_constant(*compared_cells(runs, reference, further))
    table = text_table(header, cells, SPARED)
    return "\n".join([*heading, table, *execution_lines(compare(runs, reference))])


def compared_cells(
    runs: Sequence[Run], reference: str = "fedavg", further: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the comparison."""
    rows = compare(runs, reference)
    occasional = {key: title for key, title in OCCASIONAL_COLUMNS.items() if any(key in row for row in rows)}
    rows = [dict.fromkeys(occasional) | row for row in rows]
    measured = measured_columns(further) | occasional
    columns = NAME_COLUMNS | measured
    lines = []
    for row in rows:
        label = label_of(row["method"], row["settings"])
        lines.append(format_row(row | {"method": label}, columns))
    means = [format_mean(group, measured) for group in seed_groups(runs, rows)]
    return list(columns.values()), [*lines, *means]


def measured_columns(further: bool) -> dict[str, str]:
    """What was measured, in the order of the columns."""
    first = {key: MEASURED_COLUMNS[key] for key in ("faa", "cta", "af")}
    return first | (FURTHER_COLUMNS if further else {}) | MEASURED_COLUMNS


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


def format_mean(group: Sequence[Mapping[str, Any]], measured: Mapping[str, str]) -> list[str]:
    """The texts of a row of means over seeds. A value that one of the seeds lacks is not averaged."""
    texts = []
    for key in measured:
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

    return fitted_table(header, rows, spared, Console().width, "--json")


def fitted_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], spared: Sequence[str], width: int, complete: str
) -> str:
    """The table in this width if that is possible. `complete` names what shows the columns that are left out."""
    columns = list(zip(header, *rows, strict=True))
    left_out: list[str] = []
    for name in spared:
        if table_width([least_width(cells) for cells in columns]) > width and name in header:
            columns = [cells for cells in columns if cells[0] != name]
            left_out.append(name)
    first, *others = zip(*columns, strict=True)
    table = draw_table(first, others, width)
    note = f"\nnot shown: {', '.join(left_out)}; see {complete}"
    return table + note if left_out else table


def table_width(widths: Sequence[int]) -> int:
    return sum(widths) + PADDING * (len(widths) - 1)


def whole_width(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def least_width(cells: Sequence[str]) -> int:
    """The width to which a column can be folded: numbers, with their deviations, and words are not broken."""
    beginnings = [text[:1] for text in cells[1:]]
    if all(first in ("", "-") or first.isdigit() for first in beginnings):
        return whole_width(cells)
    words = [len(word) for text in cells for word in text.split()]
    longest_word = max([word for word in words if word <= WORD_WIDTH], default=0)
    return min(whole_width(cells), max(FOLD_WIDTH, longest_word))


def column_widths(columns: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The width of each column in a table of this width: what is left goes to the narrowest folded columns."""
    whole = [whole_width(cells) for cells in columns]
    if width is None:
        return whole
    widths = [least_width(cells) for cells in columns]
    for _ in range(width - table_width(widths)):
        folded = [number for number, wanted in enumerate(whole) if widths[number] < wanted]
        if folded:
            narrowest = min(folded, key=lambda number: widths[number])
            widths[narrowest] += 1
    return widths


def draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """The table in this many characters if that is possible by folding texts; None: as wide as it needs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = list(zip(header, *rows, strict=True))
    widths = column_widths(columns, width)
    table = Table(box=None, pad_edge=False, padding=(0, PADDING, 0, 0))
    for title, least in zip(header, widths, strict=True):
        table.add_column(Text(title), overflow="fold", width=least)
    for texts in rows:
        table.add_row(*map(Text, texts))
    console = Console(file=io.StringIO(), color_system=None, width=table_width(widths))
    console.print(table)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]
