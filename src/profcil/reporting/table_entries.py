"""The items of a table: planned runs of studies, or given run folders and results stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from profcil.errors import ConfigError, RunFolderError
from profcil.plain_values import plain
from profcil.reporting.grid import Column, Item, Table, TableEntry, TableLayout
from profcil.reporting.table_metrics import measure_runs
from profcil.resolve import RunConfig, resolve
from profcil.runs.gather import load_all
from profcil.runs.identity import WITHOUT_EFFECT, hash_settings
from profcil.runs.reader import Run, load_run
from profcil.runs.results.stored_run import StoredRun
from profcil.studies.definition import Cell, Study, is_finished, list_cells, load_study
from profcil.studies.scheduler import is_not_applicable
from profcil.studies.selection import narrow_study


def items_of_studies(studies: Sequence[Study], out: Path) -> list[Item]:
    """Every cell of some studies, with the results of its run under `out`."""
    cells: dict[tuple[str, str], Cell] = {}
    for study in studies:
        cells |= {(cell.name, cell.variant): cell for cell in list_cells(study)}
    finished = [cell for cell in cells.values() if is_finished(out, cell)]
    runs = {cell.name: load_run(out / cell.name) for cell in finished}
    measured = measure_with_mismatch(list(runs.values()))
    values = dict(zip(runs, measured, strict=True))
    items = []
    for cell in cells.values():
        applicable = not is_not_applicable(out, cell)
        items.append(Item(plain(cell.config), cell.variant, applicable, values.get(cell.name)))
    return items


def items_of_runs(
    layout: TableLayout, paths: Sequence[str | Path], warn: Callable[[str], None] = lambda sentence: None
) -> list[Item]:
    """The given runs. Their settings tell which variant of the table's studies they are."""
    runs = load_all(paths, warn)
    for run in runs:
        if not run.done:
            raise RunFolderError(f"{run.path} is not finished; continue it with `profcil resume`, or leave it out")
    variants = variant_names(layout, {run.config["dataset"] for run in runs})
    if any(isinstance(run, StoredRun) and has_weak_task(run) for run in runs):
        warn("a results store has no replay gaps and no supporters of tasks; give run folders for those columns")
    items = []
    for run, values in zip(runs, measure_with_mismatch(runs), strict=True):
        config, key = resolved_config(run)
        item = Item(config, variants.get(key, ""), True, values)
        if isinstance(run, StoredRun) and key not in variants:
            item = labelled(item, run)
        items.append(item)
    return items


def resolved_config(run: Run) -> tuple[Mapping[str, Any], str]:
    """The settings of a run, and their hash. A store may have rows whose settings no longer exist: they have none."""
    try:
        config = resolve(run.config)
    except ConfigError:
        if isinstance(run, StoredRun):
            return run.config, ""
        raise
    return plain(config), hash_without_seed(config)


def labelled(item: Item, run: StoredRun) -> Item:
    """An item of a store that is none of the table's studies: its settings keep it apart from other rows."""
    part = [] if run.values["part"] == "test" else [run.values["part"]]
    differences = run.values["settings"].split()
    of_stream = [pair for pair in differences if pair.startswith("stream.")]
    label = " ".join([*part, *differences])
    stream = " ".join([*part, *of_stream])
    return replace(item, label=label, stream=stream)


def variant_names(layout: TableLayout, datasets: set[str]) -> dict[str, str]:
    """Variant names of the table's studies by a hash of their settings, at every scale and on these datasets. The scale
    `short` has the settings of `paper`."""
    names: dict[str, str] = {}
    for name in layout.studies:
        for scale in ("paper", "smoke"):
            whole = load_study(name, scale)
            study = narrow_study(whole, seeds=[0], datasets=sorted(datasets))
            names |= {hash_without_seed(cell.config): cell.variant for cell in list_cells(study)}
    return names


def hash_without_seed(config: RunConfig) -> str:
    """A hash of the settings that is the same for all seeds and devices."""
    return hash_settings(config, (*WITHOUT_EFFECT, "seed", "device"))


def measure_with_mismatch(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The results of runs. Runs with a weak task also have the comparison with their clean run."""
    measured = []
    for run, values in zip(runs, measure_runs(runs), strict=True):
        measured.append({**values, **mismatch_values(run, runs)})
    return measured


def mismatch_values(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison of a weak run with its clean run; empty if there is no weak task or no clean run."""
    from profcil.diagnostics.mismatch import mismatch_point

    if isinstance(run, StoredRun) or not has_weak_task(run):
        return {}
    try:
        return mismatch_point(run, runs) or {}
    except ConfigError:
        return {}


def has_weak_task(run: Run) -> bool:
    return run.config["stream"].get("weak_task", -1) >= 0


def plain_rows(table: Table) -> list[dict[str, Any]]:
    """The table as plain values for JSON: one row per entry."""
    rows = []
    for row in table.rows:
        names = dict(zip(table.heads, row.names, strict=True))
        for column, entry in row.entries.items():
            rows.append({**names, **plain_entry(column, entry)})
    return rows


def plain_entry(column: Column, entry: TableEntry) -> dict[str, Any]:
    """One entry as plain values."""
    by_seed = {str(seed): value for seed, value in sorted(entry.seeds.items())}
    return {
        "group": column.group,
        "metric": column.metric,
        "mean": entry.mean,
        "std": entry.spread,
        "by_seed": by_seed,
        "planned": sorted(entry.planned),
        "applicable": entry.applicable,
        "paper": entry.paper,
    }
