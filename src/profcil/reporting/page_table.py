"""A table of methods on a page: a row for each method, or each kind of its runs, and setting of a dataset.

dataset    one or several; required
methods    in any order; by default those that the store has. A method without rows has a dash.
settings   severe, homogeneous or both (severe,homogeneous)
columns    names of COLUMNS (faa,cta,af)
part       test or validation (test)
variants   none: only runs by the recipe; presets: also runs by a preset, e.g. PRO-MAX+; all: also runs with other
           settings, each kind in a row of its own (none)
regime     the budget for replay of the runs by the recipe: matched or expanded (matched)

Values are mean ± standard deviation over seeds. The paper's value follows in brackets. The best FAA, CTA and AF of a
dataset and setting are bold, among methods on the stream of the recipe. Rows of versions that compute the same results
(`runs/results/equal_versions.py`) are shown together; of versions with other results that with the most seeds is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from profcil.reporting.markdown import markdown_table
from profcil.reporting.page_lines import COLUMNS, Line, describe_origin, lines_of
from profcil.reporting.paper import method_title, paper_value
from profcil.reporting.table_metrics import METRICS
from profcil.resolve import REGIMES

MAIN = ("faa", "cta", "af")  # have the paper's value and a bold best
MISSING = "–"
REQUIRED = ("dataset",)
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


def render_table(chosen: dict[str, list[str]], store: Path, path: Path) -> str:
    """The table of a definition, and below it where its rows come from."""
    lines: list[Line] = []
    for dataset in chosen["dataset"]:
        lines += lines_of(dataset, chosen, store)
    shown = [run for line in lines for run in line.runs]
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
    return f"{markdown_table(head, body)}\n\n{describe_origin(shown, store, path)}"


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
    """Whether a line has the best mean of its dataset and setting, among methods on the stream of the recipe; not if
    there is nothing to compare."""
    means = []
    for other in lines:
        known = other.known(column)
        same_stream = other.dataset == line.dataset and other.setting == line.setting
        if same_stream and known and other.competes:
            means.append(fmean(known))
    if len(set(means)) < 2 or not line.competes:
        return False
    sign = METRICS[column].better
    best = max(means, key=lambda mean: sign * mean)
    return fmean(line.known(column)) == best
