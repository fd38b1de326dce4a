"""An overview on a page: a row for each method, a column for each dataset, final average accuracies in the cells.

dataset    several; required
rows       several; required. METHOD: by its recipe; METHOD@PRESET: by a preset; paper:METHOD: the paper's values
settings   severe, homogeneous or both, with a slash between (severe,homogeneous)
origin     full: versions, machines and dates of the runs below; none: left out (full)

A cell has the mean over seeds of test data, or a dash. The best value of a column is bold, among methods on the
recipe's stream: an upper bound has another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from profcil.errors import ConfigError
from profcil.reporting.groups import label_of
from profcil.reporting.markdown import markdown_table
from profcil.reporting.page_lines import agrees_with, describe_origin, is_run_of, with_present_settings
from profcil.reporting.paper import method_title, paper_value, stream_title
from profcil.reporting.presets import PRESET, settings_of
from profcil.reporting.store_tables import group_rows
from profcil.runs.results.store import comparable_rows, load_store
from profcil.runs.results.stored_run import StoredRun
from profcil.runs.results.stored_settings import recipe_settings

MISSING = "–"
FEW = 3  # means over fewer seeds are marked
MARK = "\\*"
NOTE = f"{MARK} fewer than three seeds."
REQUIRED = ("dataset", "rows")
DEFAULTS = {"dataset": "", "rows": "", "settings": "severe,homogeneous", "origin": "full"}
ALLOWED = {"settings": ("severe", "homogeneous"), "origin": ("full", "none")}
PAPER = "paper:"
Stream = tuple[str, str]  # dataset and heterogeneity setting


@dataclass
class OverviewRow:
    """One row: its name, and the runs, or the paper's value, of every stream."""

    name: str
    runs: dict[Stream, Sequence[StoredRun]]
    values: dict[Stream, float]
    competes: bool  # whether its values may be the best of a column


def render_table(chosen: Mapping[str, Sequence[str]], store: Path, path: Path) -> str:
    """The table of a definition, and below it where its rows come from."""
    streams = [(dataset, setting) for dataset in chosen["dataset"] for setting in chosen["settings"]]
    tested = {dataset: tested_runs(dataset, store) for dataset in chosen["dataset"]}
    rows = [read_row(text, streams, tested) for text in chosen["rows"]]
    best = {stream: best_value(rows, stream) for stream in streams}
    body = []
    for row in rows:
        cells = []
        for dataset in chosen["dataset"]:
            values = [format_value(row, (dataset, setting), best) for setting in chosen["settings"]]
            cells.append(" / ".join(values) if set(values) != {MISSING} else "")
        body.append([row.name, *cells])
    table = markdown_table(["", *map(stream_title, chosen["dataset"])], body)
    below = [NOTE] if MARK in table else []
    if chosen["origin"] == ["full"]:
        runs = [run for row in rows for found in row.runs.values() for run in found]
        below.append(describe_origin(runs, store, path))
    return "\n\n".join([table, " ".join(below)] if below else [table])


def tested_runs(dataset: str, store: Path) -> list[StoredRun]:
    """The runs of a dataset that were scored on test data."""
    file = store / f"{dataset}.csv"
    runs = with_present_settings(load_store(file)) if file.exists() else []
    return comparable_rows([run for run in runs if run.values["part"] == "test"])


def read_row(text: str, streams: Sequence[Stream], tested: Mapping[str, Sequence[StoredRun]]) -> OverviewRow:
    """The row of a word after `rows=`."""
    if text.startswith(PAPER):
        return row_of_paper(text.removeprefix(PAPER), streams)
    method, _, preset = text.partition("@")
    runs = {}
    for stream in streams:
        found = runs_of(tested[stream[0]], stream, method, preset or None)
        if found:
            runs[stream] = found
    values = {stream: fmean(run.values["faa"] for run in found) for stream, found in runs.items()}
    changes_stream = any(changes_the_stream(preset, method, stream) for stream in streams)
    name = label_of(method, {PRESET: preset} if preset else {})
    return OverviewRow(name, runs, values, competes=not changes_stream)


def row_of_paper(method: str, streams: Sequence[Stream]) -> OverviewRow:
    """The paper's values of a method."""
    values = {}
    for stream in streams:
        found = paper_value("results", *stream, method, "faa")
        if found:
            values[stream] = found[0]
    return OverviewRow(f"the paper's {method_title(method)}", {}, values, competes=False)


def runs_of(runs: Sequence[StoredRun], stream: Stream, method: str, preset: str | None) -> Sequence[StoredRun]:
    """The runs of a method with the present settings of its recipe or of a preset, a seed each."""
    dataset, setting = stream
    try:
        wanted = recipe_settings(dataset, setting, method, preset)
    except ConfigError:  # the preset is not for this dataset
        return []
    own = [run for run in runs if is_run_of(run, setting, method) and agrees_with(run, wanted)]
    return max(group_rows(own), key=len, default=[])


def changes_the_stream(preset: str, method: str, stream: Stream) -> bool:
    """Whether a preset has settings of the stream."""
    dataset, setting = stream
    settings = settings_of(preset, dataset, method, setting) if preset else {}
    return any(key.startswith("stream.") for key in settings)


def best_value(rows: Sequence[OverviewRow], stream: Stream) -> float | None:
    """The best value of a column; None if there is nothing to compare."""
    values = [row.values[stream] for row in rows if row.competes and stream in row.values]
    return max(values) if len(values) > 1 else None


def format_value(row: OverviewRow, stream: Stream, best: Mapping[Stream, float | None]) -> str:
    """A mean, bold if it is the best, with a mark if it is of few seeds."""
    if stream not in row.values:
        return MISSING
    text = f"{row.values[stream]:.1f}"
    if row.competes and row.values[stream] == best[stream]:
        text = f"**{text}**"
    few = stream in row.runs and len(row.runs[stream]) < FEW
    return f"{text}{MARK}" if few else text
