"""Tables of a Markdown page, generated from a results store.

A table stands between two markers, and is replaced as a whole:

    <!-- table: dataset=cora methods=prolin,promax columns=faa,cta,af,mb -->
    <!-- end -->

dataset    one or several, with commas; required
methods    in any order; by default those that the store has. A method without rows has a dash.
settings   severe, homogeneous or both (severe,homogeneous)
columns    names of COLUMNS (faa,cta,af)
part       test or validation (test)
variants   none: only runs by the recipe; presets: also runs by a preset, e.g. PRO-MAX+; all: also runs with other
           settings, each kind in a row of its own (none)
regime     the budget for replay of the runs by the recipe: matched or expanded (matched)

Values are mean ± standard deviation over seeds. The paper's value follows in brackets. The best FAA, CTA and AF of a
dataset and setting are bold. Of several versions that with the most seeds is shown, or the newest of several such.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from profcil import registry
from profcil.errors import ConfigError, StoreError, unknown
from profcil.io.atomic_files import write_text
from profcil.reporting.grid import METRICS, measure_runs
from profcil.reporting.groups import label_of as name_with_settings
from profcil.reporting.markdown import markdown_table
from profcil.reporting.paper import method_rank, method_title, paper_value
from profcil.reporting.presets import PRESET
from profcil.reporting.store_tables import group_rows
from profcil.resolve import REGIMES, preset_names
from profcil.runs.results.store import load_store, rows_of_one_version
from profcil.runs.results.stored_run import StoredRun
from profcil.runs.results.stored_settings import comparable_settings, recipe_settings

BLOCK = re.compile(r"(?P<begin><!-- table: (?P<definition>[^\n]*?) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.S)
BEGIN = "<!-- table:"
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
MAIN = ("faa", "cta", "af")  # have the paper's value and a bold best
MISSING = "–"
DEFAULTS = {
    "dataset": "",
    "methods": "",
    "settings": "severe,homogeneous",
    "columns": ",".join(MAIN),
    "part": "test",
    "variants": "none",
    "regime": "matched",
}
ALLOWED = {  # the names after some keys
    "columns": tuple(COLUMNS),
    "settings": ("severe", "homogeneous"),
    "part": ("test", "validation"),
    "variants": ("none", "presets", "all"),
    "regime": REGIMES,
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


def update(path: Path, store: Path) -> int:
    """Writes the tables of a page anew; the number of tables."""
    text = path.read_text(encoding="utf-8")
    rendered = render(text, store, path)
    if rendered != text:
        write_text(path, rendered)
    return len(BLOCK.findall(text))


def render(text: str, store: Path, path: Path) -> str:
    """The text of a page with the tables that the store gives."""
    if text.count(BEGIN) != len(BLOCK.findall(text)):
        raise StoreError(f"{path} has a table that does not end; close every '{BEGIN} ... -->' with '<!-- end -->'")

    def replaced(match: re.Match[str]) -> str:
        if BEGIN in match["body"]:
            raise StoreError(f"{path} has a table that does not end: {match['definition']}; add '<!-- end -->'")
        chosen = read_definition(match["definition"], path)
        return f"{match['begin']}\n{render_table(chosen, store, path)}\n\n{match['end']}"

    return BLOCK.sub(replaced, text)


def read_definition(text: str, path: Path) -> dict[str, list[str]]:
    """The keys of a marker, each a list of names."""
    given = dict(DEFAULTS)
    for pair in text.split():
        key, sign, value = pair.partition("=")
        if not sign or key not in DEFAULTS:
            raise unknown(f"key of a table in {path}", key, DEFAULTS)
        given[key] = value
    chosen = {}
    for key, value in given.items():
        chosen[key] = [name for name in value.split(",") if name]
    for key, names in ALLOWED.items():
        for name in chosen[key]:
            if name not in names:
                raise unknown(f"name after {key}= in {path}", name, names)
    if not chosen["dataset"]:
        raise StoreError(f"{path} has a table without dataset=NAME: {text}; add it")
    return chosen


def render_table(chosen: dict[str, list[str]], store: Path, path: Path) -> str:
    """The table of a definition, and below it where its rows come from."""
    lines: list[Line] = []
    for dataset in chosen["dataset"]:
        lines += lines_of(dataset, chosen, store)
    titles = [COLUMNS[column][0] for column in chosen["columns"]]
    head = ["setting", "method", "seeds", *titles]
    body = []
    for line in lines:
        method = line.label or method_title(line.method)
        seeds = str(len(line.runs))
        cells = [format_cell(line, column, lines) for column in chosen["columns"]]
        body.append([line.setting, method, seeds, *cells])
    if len(chosen["dataset"]) > 1:
        head = ["dataset", *head]
        body = [[line.dataset, *cells] for line, cells in zip(lines, body, strict=True)]
    return f"{markdown_table(head, body)}\n\n{describe_origin(lines, store, path)}"


def lines_of(dataset: str, chosen: dict[str, list[str]], store: Path) -> list[Line]:
    """The rows of one dataset, by setting and then in the order of the paper."""
    file = store / f"{dataset}.csv"
    runs = rows_of_one_version(load_store(file)) if file.exists() else []
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
    """Whether a run has these settings. Settings that were added or removed since do not count."""
    own = comparable_settings(run.config)
    return all(own[key] == wanted[key] for key in own.keys() & wanted.keys())


def is_by_recipe(run: StoredRun, regime: str) -> bool:
    """Whether a run has the settings of its recipe with this budget."""
    if not run.values["settings"]:
        return regime == "matched" or not has_budget(run.config["method"], regime)
    if regime == "matched":
        return False
    dataset, setting, method = (str(run.config[name]) for name in ("dataset", "setting", "method"))
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


def format_cell(line: Line, column: str, lines: Sequence[Line]) -> str:
    """Mean ± standard deviation, the number of seeds if some lack the value, and the paper's value in brackets."""
    digits = COLUMNS[column][1]
    known = line.known(column)
    found = paper_value("results", line.dataset, line.setting, line.method, column)
    paper = f" [{found[0]:.{digits}f}]" if found and not line.label else ""
    if not known:
        return MISSING + paper
    text = f"{fmean(known):.{digits}f}"
    if column in MAIN and is_best(line, column, lines):
        text = f"**{text}**"
    if len(known) > 1:
        text += f" ± {stdev(known):.{digits}f}"
    if len(known) < len(line.runs):
        text += f" (n = {len(known)})"
    return text + paper


def is_best(line: Line, column: str, lines: Sequence[Line]) -> bool:
    """Whether a line has the best mean of its dataset and setting; not if there is nothing to compare."""
    means = []
    for other in lines:
        known = other.known(column)
        same_stream = other.dataset == line.dataset and other.setting == line.setting
        if same_stream and known:
            means.append(fmean(known))
    if len(set(means)) < 2:
        return False
    sign = METRICS[column].better
    best = max(means, key=lambda mean: sign * mean)
    return fmean(line.known(column)) == best


def describe_origin(lines: Sequence[Line], store: Path, path: Path) -> str:
    """Versions, machines and dates of the rows, and links to their files."""
    runs = [run for line in lines for run in line.runs]
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
    for dataset in dict.fromkeys(line.dataset for line in lines if line.runs):
        link = os.path.relpath(store / f"{dataset}.csv", path.parent)
        files.append(f"[`{store.name}/{dataset}.csv`]({link})")
    sources = f"From {', '.join(files)}" if files else "No rows yet"
    return f"{sources}: {'; '.join(parts)}." if parts else f"{sources}."
