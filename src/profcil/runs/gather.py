"""Finds run folders, and loads their runs and those of results stores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from profcil.errors import RunFolderError, count
from profcil.runs.reader import Run, dataset_title, load_run
from profcil.runs.results.store import comparable_rows, has_store_columns, is_store, load_store
from profcil.runs.results.stored_run import StoredRun
from profcil.runs.run_files import explain_read_errors
from profcil.runs.settings_check import WITHOUT_EFFECT


class HasSettings(Protocol):
    """A run, or anything else with the settings of one."""

    @property
    def config(self) -> dict[str, Any]: ...


def find_run_folders(paths: Iterable[str | Path]) -> list[Path]:
    """The run folders among `paths`, and those directly inside a path that is not one itself (a study's folder).

    Files are skipped if folders were given too: a shell pattern often matches both.
    """
    given, stores = split_paths(paths)
    if stores:
        raise RunFolderError(f"{stores[0]} is a results store, which has no weights and features; give run folders")
    not_files = [path for path in given if not path.is_file()]
    found: list[Path] = []
    for path in not_files or given:
        found += run_folders_inside(path) or [path]
    return list(dict.fromkeys(found))


def run_folders_inside(path: Path) -> list[Path]:
    """The run folders directly inside a folder; empty if the path is a run folder itself, or no folder."""
    with explain_read_errors(path):
        if not path.is_dir() or is_run_folder(path):
            return []
        return sorted(inner for inner in path.iterdir() if inner.is_dir() and is_run_folder(inner))


def is_run_folder(path: Path) -> bool:
    """Whether a folder holds a run. True without permission to look: reading it will then report the problem."""
    try:
        return (path / "config.toml").is_file()
    except PermissionError:
        return True


def load_all(paths: Iterable[str | Path], warn: Callable[[str], None]) -> list[Run]:
    """The runs of folders and stores, in the order given. A run that cannot be read is an error."""
    given, stores = split_paths(paths)
    folders = find_run_folders(given) if given else []
    return [*map(load_run, folders), *load_stores(stores, warn)]


def split_paths(paths: Iterable[str | Path]) -> tuple[list[Path], list[Path]]:
    """The paths that are no results stores, and those that are.

    If folders were given too, a CSV file with other columns is a file to be skipped.
    """
    given = [Path(path) for path in paths]
    has_folders = any(path.is_dir() and not is_store(path) for path in given)
    stores = [path for path in given if is_store(path) and (not has_folders or has_store_columns(path))]
    return [path for path in given if path not in stores], stores


def load_stores(stores: Iterable[Path], warn: Callable[[str], None]) -> list[StoredRun]:
    """The runs of stores, without those that a newer version has run again."""
    found: dict[Path, list[StoredRun]] = {path: load_store(path) for path in stores}
    return comparable_rows([run for runs in found.values() for run in runs], warn)


def load_runs(paths: Iterable[str | Path], warn: Callable[[str], None], with_scores: bool = True) -> list[Run]:
    """The readable runs; `warn` gets a sentence about each other one. No readable run at all is an error.

    `with_scores` leaves out rows of a store that were imported without scores by task: curves and heatmaps need them.
    """
    given, stores = split_paths(paths)
    folders = find_run_folders(given) if given else []
    stored = load_stores(stores, warn)
    runs: list[Run] = [run for run in stored if run.has_scores or not with_scores]
    if len(runs) < len(stored):
        warn(f"left out: {count(len(stored) - len(runs), 'row')} of a results store, imported without scores by task")
    for path in folders:
        try:
            runs.append(load_run(path))
        except RunFolderError as error:
            if len(folders) == 1 and not runs:
                raise
            warn(f"left out: {error}")
    if not runs and stores and not folders:
        raise RunFolderError(f"{stores[0]} has no row with scores by task; add runs with `profcil results add`")
    if not runs:
        raise RunFolderError(
            f"none of the {len(folders)} folders given is a readable run; give folders that `profcil run` wrote"
        )
    return runs


def finished_runs(runs: Sequence[Run], warn: Callable[[str], None]) -> list[Run]:
    """The finished runs; `warn` gets a sentence about each other one. No finished run at all is an error."""
    for run in runs:
        if not run.done:
            warn(f"left out: {run.path} is not finished; continue it with `profcil resume {run.path}`")
    done = [run for run in runs if run.done]
    if not done:
        raise RunFolderError("none of the runs given is finished; continue them with `profcil resume RUN`")
    return done


def settings_without_seed(run: Run) -> str:
    """The settings that runs must share to be averaged, as a text to compare by."""
    shared = {key: value for key, value in run.config.items() if key not in WITHOUT_EFFECT}
    return json.dumps(shared, sort_keys=True)


def stream_name(run: HasSettings) -> str:
    """Dataset and setting, and the evaluated part unless it is test data: such runs are not compared with others."""
    part = run.config.get("evaluate", "test")
    of_part = "" if part == "test" else f", {part} data"
    return f"{dataset_title(run.config)}, {run.config['setting']}{of_part}"
