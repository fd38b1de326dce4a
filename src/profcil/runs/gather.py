"""Finds run folders, loads their runs and those of results stores, and groups runs that differ only in the seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profcil.errors import RunFolderError
from profcil.runs.reader import Run, explain_read_errors, load_run
from profcil.runs.settings_check import SEED_AND_MACHINE, flatten_settings
from profcil.runs.store import has_store_columns, is_store, load_store, newest_runs
from profcil.runs.stored_run import StoredRun


@dataclass(frozen=True)
class Group:
    """Finished runs of one method that differ only in the seed."""

    stream: str  # dataset and setting: what one panel of a figure shows
    label: str  # the method, and the settings that distinguish it from other runs of the method in the same panel
    runs: tuple[Run, ...]


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
    return newest_runs([run for runs in found.values() for run in runs], warn)


def load_runs(paths: Iterable[str | Path], warn: Callable[[str], None]) -> list[Run]:
    """The readable runs; `warn` gets a sentence about each other one. No readable run at all is an error.

    Rows of a store that have no scores by task, which were imported, are left out: curves and heatmaps need them.
    """
    given, stores = split_paths(paths)
    folders = find_run_folders(given) if given else []
    stored = load_stores(stores, warn)
    runs: list[Run] = [run for run in stored if run.has_scores]
    if len(runs) < len(stored):
        warn(f"left out: {len(stored) - len(runs)} rows of a results store, which were imported without scores by task")
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


def load_groups(paths: Sequence[str | Path], warn: Callable[[str], None]) -> list[Group]:
    """The groups of the finished runs among `paths`."""
    return group_runs(finished_runs(load_runs(paths, warn), warn))


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups of runs that differ only in seed and machine, in the order of their first runs.

    If a seed occurs twice in a group, the first run counts.
    """
    by_settings: dict[str, dict[int, Run]] = {}
    for run in runs:
        by_seed = by_settings.setdefault(settings_without_seed(run), {})
        by_seed.setdefault(run.config["seed"], run)
    members = [tuple(by_seed[seed] for seed in sorted(by_seed)) for by_seed in by_settings.values()]
    firsts = [runs_of_group[0] for runs_of_group in members]
    return [Group(stream_name(own[0]), group_label(own[0], firsts), own) for own in members]


def settings_without_seed(run: Run) -> str:
    """The settings that runs must share to be averaged, as a text to compare by."""
    shared = {key: value for key, value in run.config.items() if key not in SEED_AND_MACHINE}
    return json.dumps(shared, sort_keys=True)


def stream_name(run: Run) -> str:
    return f"{run.config['dataset']}, {run.config['setting']}"


def group_label(run: Run, firsts: Sequence[Run]) -> str:
    """A short label for the group of `run`; `firsts` has one run of every group.

    It is the method. If other groups have the same method and stream, it also has the settings that distinguish this
    group from each of them, and the number of further settings that differ: `promax (noise=0.1, +2)`.
    """
    method = run.config["method"]
    same_method = [other for other in firsts if other.config["method"] == method]
    peers = [other for other in same_method if stream_name(other) == stream_name(run)]
    weak_tasks = {peer.config["stream"].get("weak_task", -1) for peer in peers} - {-1}
    with_task = len(weak_tasks) > 1
    own = label_settings(run.config, with_task)
    others = [label_settings(peer.config, with_task) for peer in peers]
    differing = []
    for key, value in own.items():
        differs = any(other.get(key) != value for other in others)
        if differs and key not in SEED_AND_MACHINE:
            differing.append(key)
    named = distinguishing(own, others, differing)
    texts = [f"{key.split('.')[-1]}={own[key]}" for key in named]
    if len(differing) > len(named):
        texts.append(f"+{len(differing) - len(named)}")
    return f"{method} ({', '.join(texts)})" if texts else method


def label_settings(config: dict[str, Any], with_task: bool) -> dict[str, Any]:
    """The settings as a label shows them. A weak task is one entry: its strength and, if asked for, its number."""
    settings = flatten_settings(config)
    task = settings.pop("stream.weak_task", None)
    strength = settings.pop("stream.weak_strength", None)
    if task is None:
        return settings
    if task < 0:
        settings["weak"] = "none"
    else:
        settings["weak"] = f"{strength}, task {task + 1}" if with_task else strength
    return settings


def distinguishing(own: dict[str, Any], others: Sequence[dict[str, Any]], differing: Sequence[str]) -> list[str]:
    """The keys, in order, each of which rules out further ones of the other groups."""
    named: list[str] = []
    equal_so_far = list(others)
    for key in differing:
        still_equal = [other for other in equal_so_far if other.get(key) == own[key]]
        if len(still_equal) < len(equal_so_far):
            named.append(key)
            equal_so_far = still_equal
    return named
