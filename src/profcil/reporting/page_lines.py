"""The lines of a table on a page: runs of a results store that differ only in the seed, and what a line is called."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from profcil import registry
from profcil.errors import ConfigError
from profcil.reporting.groups import label_of as name_with_settings
from profcil.reporting.paper import method_rank, method_title
from profcil.reporting.presets import PRESET
from profcil.reporting.store_tables import group_rows
from profcil.reporting.table_metrics import measure_runs
from profcil.resolve import preset_names
from profcil.runs.results.store import comparable_rows, load_store
from profcil.runs.results.stored_run import StoredRun
from profcil.runs.results.stored_settings import comparable_settings, describe_differences, recipe_settings

COLUMNS = {
    "faa": ("FAA", 1),
    "cta": ("CTA", 1),
    "af": ("AF", 1),
    "comm": ("NormComm", 3),
    "mb": ("MB sent", 0),
    "gb": ("GB sent", 1),
    "probe_warm": ("probe, warm", 1),
    "probe_end": ("probe, end", 1),
    "align": ("align", 2),
    "centred": ("centred", 2),
    "seconds": ("seconds", 0),
    "peak_memory_mb": ("peak MB", 0),
}


@dataclass
class Line:
    """One row of a table: runs of one method that differ only in the seed."""

    dataset: str
    setting: str
    method: str
    label: str
    runs: Sequence[StoredRun]
    values: Sequence[dict[str, Any]]  # of each run, by names of COLUMNS

    def known(self, column: str) -> list[float]:
        return [values[column] for values in self.values if values.get(column) is not None]

    @property
    def competes(self) -> bool:
        """Whether the runs had the stream of the recipe; an upper bound has another one."""
        differing = self.runs[0].values["settings"] if self.runs else ""
        return not any(setting.startswith("stream.") for setting in differing.split())


def lines_of(dataset: str, chosen: dict[str, list[str]], store: Path) -> list[Line]:
    """The rows of one dataset, by setting and then in the order of the paper."""
    file = store / f"{dataset}.csv"
    runs = comparable_rows(with_present_settings(load_store(file))) if file.exists() else []
    measured = dict(zip(map(id, runs), measure_runs(runs), strict=True))  # of all, as NormComm needs FedAvg
    shown = [run for run in runs if is_chosen(run, chosen)]
    in_store = {run.config["method"] for run in shown}
    methods = sorted(chosen["methods"] or in_store, key=method_rank)
    lines = []
    for setting in chosen["settings"]:
        for method in methods:
            own = [run for run in shown if is_run_of(run, setting, method)]
            for group in group_rows(own) or [[]]:
                values = [values_of(run, measured[id(run)]) for run in group]
                label = label_of(group, chosen["regime"][0])
                lines.append(Line(dataset, setting, method, label, group, values))
    return lines


def with_present_settings(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """The runs with `settings` that say what differs from the present recipe, whatever the recipe was when they were
    added. So runs with the same settings are shown together, also if the recipe has changed between them.

    A setting that the present recipe lacks (noise, or one that is no more) counts if it differed when a run was added.
    """
    present = []
    for run in runs:
        dataset, setting, method = (str(run.config[name]) for name in ("dataset", "setting", "method"))
        own = comparable_settings(run.config)
        recipe = present_recipe(dataset, setting, method)
        compared = {key: value for key, value in own.items() if key in recipe or key in differed(run)}
        differing = describe_differences(compared, {key: recipe[key] for key in compared.keys() & recipe.keys()})
        present.append(replace(run, values={**run.values, "settings": differing}))
    return present


def differed(run: StoredRun) -> set[str]:
    """The settings in which a run differs from its recipe."""
    return {pair.partition("=")[0] for pair in run.values["settings"].split()}


@cache
def present_recipe(dataset: str, setting: str, method: str) -> dict[str, Any]:
    """The settings of a run by the present recipe alone."""
    return recipe_settings(dataset, setting, method)


def is_run_of(run: StoredRun, setting: str, method: str) -> bool:
    return run.config["setting"] == setting and run.config["method"] == method


def label_of(group: Sequence[StoredRun], regime: str) -> str:
    """What a row is called if its runs depart from the recipe: the method and the preset, or the settings that differ.
    Empty if they do not depart."""
    settings = group[0].values["settings"] if group else ""
    if not settings or is_by_recipe(group[0], regime):
        return ""
    method = group[0].config["method"]
    preset = preset_of(group[0])
    return name_with_settings(method, {PRESET: preset}) if preset else f"{method_title(method)} ({settings})"


def preset_of(run: StoredRun) -> str:
    """The name of the preset that a run was made by; empty if there is none."""
    dataset, setting, method = (str(run.config[name]) for name in ("dataset", "setting", "method"))
    for preset in preset_names():
        with suppress(ConfigError):  # presets that are not for this method
            if agrees_with(run, recipe_settings(dataset, setting, method, preset)):
                return preset
    return ""


def agrees_with(run: StoredRun, wanted: Mapping[str, Any]) -> bool:
    """Whether a run has these settings. Settings that were added or removed since do not count, but those in which the
    run differs from the recipe do: noise, say."""
    own = comparable_settings(run.config)
    if differed(run) & own.keys() - wanted.keys():
        return False
    return all(own[key] == wanted[key] for key in own.keys() & wanted.keys())


def is_by_recipe(run: StoredRun, regime: str) -> bool:
    """Whether a run has the settings of its recipe with this budget."""
    dataset, setting, method = (str(run.config[name]) for name in ("dataset", "setting", "method"))
    if regime == "matched" or not has_budget(method, regime):
        return not run.values["settings"]
    return agrees_with(run, recipe_settings(dataset, setting, method, regime=regime))


def has_budget(method: str, regime: str) -> bool:
    """Whether a regime changes settings of a method."""
    return bool(registry.find("methods", method).METHOD.regimes.get(regime))


def is_chosen(run: StoredRun, chosen: dict[str, list[str]]) -> bool:
    """Whether a run is of the part, the budget and the variants that a table shows."""
    if run.values["part"] not in chosen["part"]:
        return False
    if is_by_recipe(run, chosen["regime"][0]) or chosen["variants"] == ["all"]:
        return True
    return chosen["variants"] == ["presets"] and bool(preset_of(run))


def values_of(run: StoredRun, measured: dict[str, Any]) -> dict[str, Any]:
    """The values of a run by the names of COLUMNS."""
    probes = {name: run.values[name] for name in ("probe_warm", "probe_end")}
    megabytes = measured["mb"]
    gigabytes = megabytes / 1e3 if megabytes is not None else None
    return {**measured, **probes, "gb": gigabytes}


def describe_origin(runs: Sequence[StoredRun], store: Path, path: Path) -> str:
    """Versions, machines and dates of runs, and links to their files."""
    parts = []
    for title, column in (("profcil", "profcil"), ("torch", "torch"), ("", "machine"), ("", "date")):
        found = sorted({run.values[column] for run in runs if run.values[column]})
        if found:
            joined = ", ".join(found)
            if column == "date" and len(found) > 1:
                joined = f"{found[0]} to {found[-1]}"
            parts.append(f"{title} {joined}".strip())
    if any(run.values["origin"] == "imported" for run in runs):
        parts.append("imported from an older table")
    files = []
    for dataset in dict.fromkeys(run.values["dataset"] for run in runs):
        link = os.path.relpath(store / f"{dataset}.csv", path.parent)
        files.append(f"[`{store.name}/{dataset}.csv`]({link})")
    sources = f"From {', '.join(files)}" if files else "No rows yet"
    return f"{sources}: {'; '.join(parts)}." if parts else f"{sources}."
