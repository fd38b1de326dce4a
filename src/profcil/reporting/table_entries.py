"""Planned and given runs as the items of a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profcil.config import plain
from profcil.errors import ConfigError, RunFolderError
from profcil.reporting.grid import Item, Layout, Table, measured
from profcil.runs.reader import Run, load_run
from profcil.studies.definition import FREE, SCALES, Cell, Study, cells, finished, key_of, load_study
from profcil.studies.selection import narrowed


def of_study(studies: Sequence[Study], out: Path) -> list[Item]:
    """Every cell of some studies, with what its run under `out` came to."""
    todo = {(cell.name, cell.variant): cell for study in studies for cell in cells(study)}
    return of_cells(list(todo.values()), out)


def of_cells(todo: Sequence[Cell], out: Path) -> list[Item]:
    from profcil.studies.scheduler import misfit

    there = {c.name: load_run(out / c.name) for c in todo if finished(out, c)}
    found = with_mismatch(list(there.values()))
    by_name = dict(zip(there, found, strict=True))
    return [Item(plain(c.config), c.variant, not misfit(out, c), by_name.get(c.name)) for c in todo]


def of_runs(layout: Layout, paths: Sequence[Path]) -> list[Item]:
    """Given folders; a variant of the table's studies is recognised by its settings."""
    from profcil.resolve import resolve

    runs = [load_run(path) for path in paths]
    unfinished = [str(run.path) for run in runs if not run.done]
    if unfinished:
        raise RunFolderError(f"{unfinished[0]} is not finished; go on with `profcil resume`, or leave it out")
    known = variants(layout, {run.config["dataset"] for run in runs})
    configs = [resolve(str(run.path / "config.toml")) for run in runs]
    names = [known.get(key_of(c, (*FREE, "seed", "device")), "") for c in configs]
    return [Item(plain(c), n, True, v) for c, n, v in zip(configs, names, with_mismatch(runs), strict=True)]


def variants(layout: Layout, datasets: set[str]) -> dict[str, str]:
    """Variant names by everything but the seed, at every scale and on these datasets."""
    found: dict[str, str] = {}
    for name in layout.studies:
        for scale in SCALES:
            study = narrowed(load_study(name, scale), seeds=[0], datasets=sorted(datasets))
            found |= {key_of(c.config, (*FREE, "seed", "device")): c.variant for c in cells(study)}
    return found


def with_mismatch(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What was measured, and for runs with a weak task what the diagnostics found beside their clean run."""
    from profcil.diagnostics.mismatch import point

    def found(run: Run) -> dict[str, Any]:
        if run.config["stream"].get("weak_task", -1) < 0:
            return {}
        try:
            return point(run, runs) or {}
        except ConfigError:
            return {}

    return [{**values, **found(run)} for run, values in zip(runs, measured(runs), strict=True)]


def plain_rows(table: Table) -> list[dict[str, Any]]:
    """The table for programs: a row per entry."""
    return [
        {
            **dict(zip(table.heads, row.names, strict=True)),
            "group": column.group,
            "metric": column.metric,
            "mean": entry.mean,
            "std": entry.spread,
            "by_seed": {str(seed): value for seed, value in sorted(entry.seeds.items())},
            "planned": sorted(entry.planned),
            "applicable": entry.applicable,
            "paper": entry.paper,
        }
        for row in table.rows
        for column, entry in row.entries.items()
    ]
