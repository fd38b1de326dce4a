"""A study as one table: mean ± standard deviation over seeds, with the paper's values."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from profcil.config import OWN
from profcil.reporting.markdown import markdown_table
from profcil.reporting.paper import paper_value
from profcil.reporting.tables import compare, text_table
from profcil.resolve import resolve
from profcil.runs.identity import read_json
from profcil.runs.reader import Run, load_run
from profcil.studies.definition import Cell, is_finished
from profcil.studies.scheduler import NOT_APPLICABLE, is_not_applicable

METRICS = ("faa", "cta", "af")
Key = tuple[str, str, str]  # dataset, setting and labelled method: one row of the table
Spread = tuple[float, float | None, int]  # mean, standard deviation, number of values


def summarise(cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """A row per dataset, setting and labelled method, from the finished runs."""
    finished = [cell for cell in cells if is_finished(out, cell)]
    runs = [load_run(out / cell.name) for cell in finished]
    last_cells = {row_key(cell): cell for cell in cells}
    planned = Counter(row_key(cell) for cell in cells)
    results: dict[Key, list[tuple[Run, dict]]] = {key: [] for key in last_cells}
    for cell, run, row in zip(finished, runs, compare(runs), strict=True):
        results[row_key(cell)].append((run, row))
    rows = []
    for key, group in results.items():
        cell = last_cells[key]
        applicable = not is_not_applicable(out, cell)
        more: dict[str, Any] = {"paper": paper_metrics(cell), "applicable": applicable}
        more |= {"settings": dict(cell.settings), "planned": planned[key]}
        rows.append(summarise_group(key, group) | more)
    return rows


def row_key(cell: Cell) -> Key:
    return cell.config.dataset, cell.config.setting, cell.label


def summarise_group(key: Key, group: Sequence[tuple[Run, dict]]) -> dict[str, Any]:
    """Mean and standard deviation of every value over the runs of one row."""
    dataset, setting, label = key
    out: dict[str, Any] = {"dataset": dataset, "setting": setting, "method": label, "seeds": len(group)}
    for name in (*METRICS, "norm_comm", "seconds", "warmup_seconds", "peak_memory_mb"):
        out[name] = mean_and_deviation([row[name] for _, row in group])
    sent = [(row["bytes_down"] + row["bytes_up"]) / 1e6 for _, row in group]
    out["sent_mb"] = mean_and_deviation(sent)
    warmup = [run.ledger.total(stage="warmup") / 1e6 for run, _ in group]
    out["warm_mb"] = mean_and_deviation(warmup)
    diagnostics = [read_json(run.path / "diagnostics.json") for run, _ in group]
    for name in ("probe_warm", "probe_final"):
        probes = [by_probe.get(name, {}) for by_probe in diagnostics]
        out[name] = mean_and_deviation([probe.get("ridge") for probe in probes])
    alignments = [run.final_alignment().get("memory", {}) for run, _ in group]
    for name in ("align", "centred"):
        out[name] = mean_and_deviation([alignment.get(name) for alignment in alignments])
    return out


def mean_and_deviation(values: Sequence[float | None]) -> Spread | None:
    """Mean, sample standard deviation and number of the known values; a single value has no deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    deviation = stdev(known) if len(known) > 1 else None
    return fmean(known), deviation, len(known)


def paper_metrics(cell: Cell) -> dict[str, float] | None:
    """The paper's main results for a cell; None for named variants and for streams that are not the paper's."""
    c = cell.config
    if c.dataset == OWN:
        return None
    paper_stream = resolve(None, {"dataset": c.dataset, "setting": c.setting}).stream
    if cell.variant or c.stream != paper_stream:
        return None
    means = {}
    for name in METRICS:
        value = paper_value("results", c.dataset, c.setting, c.method, name)
        if value:
            means[name] = value[0]
    return means or None


def method_of(row: Mapping[str, Any]) -> str:
    """The method of a row without its variant."""
    return str(row["method"]).split(" (")[0]


def best_variants(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The variant of each method with the highest mean FAA, by dataset and setting, and the number of variants tried.

    Only variants with the most seeds are candidates.
    """
    tried: dict[Key, list[dict[str, Any]]] = {}
    for row in rows:
        if row["faa"] is not None:
            key = (row["dataset"], row["setting"], method_of(row))
            tried.setdefault(key, []).append(row)
    best = []
    for group in tried.values():
        most_seeds = max(row["seeds"] for row in group)
        candidates = [row for row in group if row["seeds"] == most_seeds]
        highest = max(candidates, key=lambda row: row["faa"][0])
        best.append({**highest, "tried": len(group)})
    return best


# Left out first on a narrow terminal.
SPARED = ("align", "centred", "MB warm-up", "seconds", "MB sent", "paper: FAA / CTA / AF", "probe, warm", "probe, end")
COLUMNS = {
    "faa": ("FAA", 1),
    "cta": ("CTA", 1),
    "af": ("AF", 1),
    "warm_mb": ("MB warm-up", 0),
    "sent_mb": ("MB sent", 0),
    "norm_comm": ("NormComm", 3),
    "probe_warm": ("probe, warm", 1),
    "probe_final": ("probe, end", 1),
    "align": ("align", 2),
    "centred": ("centred", 2),
    "seconds": ("seconds", 0),
}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table as Markdown."""
    return markdown_table(*table_cells(rows))


def table_text(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A table in aligned columns on a terminal, and as Markdown in a pipe."""
    return text_table(titles, cells, SPARED) if sys.stdout.isatty() else markdown_table(titles, cells)


def table_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells. Columns without values are omitted, and so is warm-up traffic if it is all the same."""
    if not warmups_differ(rows):
        rows = [{**row, "warm_mb": None} for row in rows]
    table: dict[str, list[str]] = {}
    for key in ("dataset", "setting", "method", "tried", "seeds"):
        if not rows or key in rows[0]:
            table[key] = [str(row[key]) for row in rows]
    for key, (title, digits) in COLUMNS.items():
        table[title] = [format_spread(row[key], digits, row["seeds"]) for row in rows]
    table["paper: FAA / CTA / AF"] = [join_metrics(row["paper"]) for row in rows]
    for i, row in enumerate(rows):
        if not row["applicable"]:
            table["FAA"][i] = NOT_APPLICABLE
    columns = {title: cells for title, cells in table.items() if any(cells)}
    lines = [list(cells) for cells in zip(*columns.values(), strict=True)]
    return list(columns), lines


def warmups_differ(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether runs of one dataset and setting have different warm-up traffic."""
    traffic: dict[tuple[str, str], set[float]] = {}  # by dataset and setting
    for row in rows:
        if row["warm_mb"]:
            mean, *_ = row["warm_mb"]
            stream = (row["dataset"], row["setting"])
            traffic.setdefault(stream, set()).add(mean)
    return any(len(means) > 1 for means in traffic.values())


def format_spread(value: Spread | None, digits: int, seeds: int) -> str:
    if value is None:
        return ""
    mean, deviation, count = value
    text = f"{mean:.{digits}f}"
    if deviation is not None:
        text += f" ± {deviation:.{digits}f}"
    if count < seeds:
        text += f" (n = {count})"
    return text


def join_metrics(paper: dict[str, float] | None) -> str:
    return " / ".join(f"{value:.1f}" for value in paper.values()) if paper else ""
