"""A study as one table: mean ± standard deviation over seeds, the paper's figure beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from profcil.reporting.paper import figure
from profcil.reporting.tables import compare
from profcil.resolve import resolve
from profcil.runs.reader import Run, load_run, read_final_alignment
from profcil.studies.definition import Cell, read_json
from profcil.studies.scheduler import NOT_APPLICABLE, misfit

METRICS = ("faa", "cta", "af")
Spread = tuple[float, float | None, int]


def summarise(cells: Sequence[Cell], out: Path) -> list[dict[str, Any]]:
    """A row per dataset, setting and labelled method; what is missing is counted, never filled in."""
    loaded = [
        (cell, load_run(out / cell.name)) for cell in cells if read_json(out / cell.name / "run.json").get("done")
    ]
    rows = compare([run for _, run in loaded])
    groups: dict[tuple, list[tuple[Run, dict]]] = {}
    more: dict[tuple, dict[str, Any]] = {}
    for cell in cells:
        key = (cell.config.dataset, cell.config.setting, cell.label)
        groups.setdefault(key, [])
        more[key] = {"paper": paper(cell), "applicable": not misfit(out, cell)}
    for (cell, run), row in zip(loaded, rows, strict=True):
        groups[(cell.config.dataset, cell.config.setting, cell.label)].append((run, row))
    return [line(key, group) | more[key] for key, group in groups.items()]


def line(key: tuple[str, str, str], group: Sequence[tuple[Run, dict]]) -> dict[str, Any]:
    dataset, setting, label = key
    out: dict[str, Any] = {"dataset": dataset, "setting": setting, "method": label, "seeds": len(group)}
    for name in (*METRICS, "norm_comm", "seconds", "warmup_seconds", "peak_memory_mb"):
        out[name] = spread([row[name] for _, row in group])
    out["sent_mb"] = spread([(row["bytes_down"] + row["bytes_up"]) / 1e6 for _, row in group])
    out["warm_mb"] = spread([run.ledger.total(stage="warmup") / 1e6 for run, _ in group])
    probes = [read_json(run.path / "diagnostics.json") for run, _ in group]
    for name in ("probe_warm", "probe_final"):
        out[name] = spread([d.get(name, {}).get("ridge") for d in probes])
    final = [read_final_alignment(run.path).get("memory", {}) for run, _ in group]
    out["align"] = spread([a.get("align") for a in final])
    out["centred"] = spread([a.get("centred") for a in final])
    return out


def spread(values: Sequence[float | None]) -> Spread | None:
    """Mean and sample standard deviation of what was measured, and on how many seeds that was; of one there is no
    deviation."""
    known = [v for v in values if v is not None]
    return (fmean(known), stdev(known) if len(known) > 1 else None, len(known)) if known else None


def paper(cell: Cell) -> dict[str, float] | None:
    """The paper's main figures for a cell of its own stream, where it has some. A method as it was chosen is still that
    method; a variant with a name is something else."""
    c = cell.config
    if cell.variant or c.stream != resolve(None, {"dataset": c.dataset, "setting": c.setting}).stream:
        return None
    found = {name: figure("results", c.dataset, c.setting, c.method, name) for name in METRICS}
    return {name: f[0] for name, f in found.items() if f} or None


def best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each method's variants the one with the highest mean FAA, by dataset and setting, and how many were tried.
    A cell that lacks seeds is no candidate as long as another has more."""
    tried: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row["faa"] is not None:
            tried.setdefault((row["dataset"], row["setting"], row["method"].split(" (")[0]), []).append(row)
    whole = {key: [r for r in group if r["seeds"] == max(g["seeds"] for g in group)] for key, group in tried.items()}
    return [{**max(group, key=lambda r: r["faa"][0]), "tried": len(tried[key])} for key, group in whole.items()]


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
    """The table for the docs. A column that nobody has a value for is left out, and so is the warm-up's traffic where
    all have the same."""
    rows = rows if warm_ups_differ(rows) else [{**row, "warm_mb": None} for row in rows]
    heads = [key for key in ("dataset", "setting", "method", "tried", "seeds") if not rows or key in rows[0]]
    table: dict[str, list[str]] = {key: [str(row[key]) for row in rows] for key in heads}
    for key, (title, digits) in COLUMNS.items():
        table[title] = [_pair(row[key], digits, row["seeds"]) for row in rows]
    table["paper: FAA / CTA / AF"] = [_slashes(row["paper"]) for row in rows]
    table["FAA"] = [text if row["applicable"] else NOT_APPLICABLE for row, text in zip(rows, table["FAA"], strict=True)]
    columns = {title: cells for title, cells in table.items() if any(cells)}
    lines = [list(columns), ["---"] * len(columns), *map(list, zip(*columns.values(), strict=True))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def warm_ups_differ(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether runs of one dataset and setting began in different ways."""
    found = {(row["dataset"], row["setting"], row["warm_mb"][0]) for row in rows if row["warm_mb"]}
    return len(found) > len({(dataset, setting) for dataset, setting, _ in found})


def _pair(value: Spread | None, digits: int, seeds: int) -> str:
    if value is None:
        return ""
    mean, deviation, known = value
    spread = f" ± {deviation:.{digits}f}" if deviation is not None else ""
    return f"{mean:.{digits}f}{spread}" + (f" (n = {known})" if known < seeds else "")


def _slashes(paper: dict[str, float] | None) -> str:
    return " / ".join(f"{v:.1f}" for v in paper.values()) if paper else ""
