"""What a results store holds: rows that differ only in the seed, and their mean."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from profcil.errors import unknown
from profcil.runs.results.equal_versions import version_numbers
from profcil.runs.results.store import load_store, result_version, without_seed
from profcil.runs.results.stored_run import StoredRun

NAMES = ("dataset", "method", "setting", "part", "settings")


def list_store(store: Path, dataset: str | None = None) -> list[dict[str, Any]]:
    """A row per method, setting, part, differing settings and versions with the same results: its seeds and its FAA."""
    runs = load_store(store)
    datasets = sorted({run.values["dataset"] for run in runs})
    if dataset is not None and dataset not in datasets:
        raise unknown("dataset in the store", dataset, datasets)
    chosen = [run for run in runs if dataset in (None, run.values["dataset"])]
    return [summarise_group(group) for group in group_rows(chosen)]


def group_rows(runs: Iterable[StoredRun]) -> list[list[StoredRun]]:
    """Rows that differ only in seed, machine and version with the same results; of two rows with one seed the first
    counts."""
    groups: dict[tuple[str, ...], dict[int, StoredRun]] = {}
    for run in runs:
        by_seed = groups.setdefault((*without_seed(run), result_version(run)), {})
        by_seed.setdefault(run.values["seed"], run)
    return [list(by_seed.values()) for by_seed in groups.values()]


def summarise_group(group: list[StoredRun]) -> dict[str, Any]:
    """Names, seeds, and mean and sample standard deviation of FAA."""
    names = {name: group[0].values[name] for name in NAMES}
    names["profcil"] = ", ".join(sorted({run.values["profcil"] for run in group}, key=version_numbers))
    values = [run.values["faa"] for run in group]
    deviation = stdev(values) if len(values) > 1 else None
    seeds = sorted(run.values["seed"] for run in group)
    return {**names, "seeds": seeds, "faa": fmean(values), "sd": deviation}
