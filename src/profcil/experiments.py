"""Studies, sweeps and comparisons from Python: what `profcil study`, `run` with several values and `compare` do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.api import check_flags, data_root
from profcil.errors import ConfigError, DataError
from profcil.resolve import toml_value
from profcil.runs.reader import Run

if TYPE_CHECKING:
    from profcil.reporting.result_table import ResultTable
    from profcil.studies.definition import Cell


def study(
    study: str | Path | Mapping[str, Any],
    *,
    out: str | Path = "runs/study",
    scale: str = "paper",
    seeds: Iterable[int] | None = None,
    methods: Iterable[str] | None = None,
    datasets: Iterable[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    jobs: int = 1,
) -> ResultTable:
    """Runs the unfinished runs of a study and returns its table.

    `study` is a built-in name, a TOML file, or a dict of what such a file holds (docs/studies.md). `seeds`, `methods`,
    `datasets` and `settings` change it as the flags of `profcil study` do. `jobs` runs are computed at a time, each in
    a process of its own. A run that fails does not stop the others; `failures` of the table says why.
    """
    from profcil.diagnostics.mismatch import write_mismatch
    from profcil.reporting.study_table import summarise, table_cells
    from profcil.studies.definition import list_all_cells, list_cells
    from profcil.studies.selection import select_studies

    name = study if isinstance(study, Mapping) else str(study)
    sets = [f"{key}={set_text(value)}" for key, value in (settings or {}).items()]
    chosen = select_studies(name, scale, seeds, methods, datasets, sets)
    cells = list_all_cells(chosen)
    failures: dict[str, str] = {}
    for one in chosen:
        failures |= run_unfinished(list_cells(one), Path(out), data_root(data), jobs, one.diagnose)
    write_mismatch(cells, Path(out))
    rows = summarise(cells, Path(out))
    return result_table(rows, table_cells(rows), Path(out), failures)


def sweep(
    recipe: str | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    out: str | Path = "runs/sweep",
    data: str | Path | None = None,
    jobs: int = 1,
    **flags: Any,
) -> ResultTable:
    """Runs every combination of some values and returns one table, whose columns are the settings that differ.

    A list has several values: sweep("digits", method=["pro", "promax"], seed=[0, 1], settings={"noise": [0.1, 0.2]}).
    A value that is a list itself is a tuple. The arguments are those of `profcil.run`.
    """
    from profcil.reporting.study_table import summarise
    from profcil.reporting.sweep_table import sweep_cells as table_of
    from profcil.studies.sweep import sweep_cells

    check_flags(flags, "profcil.sweep")
    cells = sweep_cells(recipe, {**flags, "data": data}, settings or {})
    failures = run_unfinished(cells, Path(out), data_root(data), jobs)
    rows = summarise(cells, Path(out))
    return result_table(rows, table_of(rows), Path(out), failures)


def compare(runs: Sequence[Run | str | Path], *, reference: str = "fedavg") -> ResultTable:
    """A table with a row per run: metrics, traffic, time and the settings that differ.

    `runs` are runs, or paths as for `profcil compare`. NormComm is relative to the runs of the method `reference`.
    """
    from profcil.reporting import tables
    from profcil.runs.gather import load_all

    found: list[Run] = []
    for run in runs:
        found += [run] if isinstance(run, Run) else load_all([run], lambda sentence: None)
    if not found:
        raise ConfigError("there are no runs to compare; give runs or their folders")
    return result_table(tables.compare(found, reference), tables.compared_cells(found, reference))


def result_table(rows: list[dict[str, Any]], cells: tuple[Any, Any], *more: Any) -> ResultTable:
    from profcil.reporting.result_table import ResultTable

    return ResultTable(rows, *cells, *more)


def run_unfinished(cells: Sequence[Cell], out: Path, data: Path, jobs: int, diagnose: bool = False) -> dict[str, str]:
    """Runs the cells that are not finished. Returns the message of each one that failed."""
    from profcil.cli.main import main
    from profcil.studies.checks import missing_data
    from profcil.studies.definition import check_data
    from profcil.studies.scheduler import NOT_APPLICABLE, run_cells

    if jobs < 1:
        raise ConfigError(f"jobs is {jobs}, allowed is at least 1; leave it out for one run at a time")
    if lacking := missing_data(cells, out, data):
        raise DataError(lacking)
    out.mkdir(parents=True, exist_ok=True)
    check_data(cells, out, data)
    failures: dict[str, str] = {}

    def report(cell: Cell, event: str) -> None:
        if event not in ("started", "done") and not event.startswith(NOT_APPLICABLE):
            failures[cell.name] = event

    run_cells(cells, out, data, jobs, diagnose, report, main)
    return failures


def set_text(value: Any) -> str:
    """A value as `--set` takes it: a text as it is, anything else as TOML."""
    return value if isinstance(value, str) else toml_value(value)
