"""The result of a study, a sweep or a comparison in Python: rows, text, HTML and a pandas frame."""

from __future__ import annotations

import html
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profcil.reporting import study_table, tables
from profcil.reporting.tables import fitted_table
from profcil.runs.reader import import_pandas

SPARED = (*study_table.SPARED, *tables.SPARED)  # columns that are left out first of a text that is too wide


@dataclass(frozen=True, repr=False)
class ResultTable:
    """A table of runs. `rows` has every value; text and HTML show the columns of the command line."""

    rows: list[dict[str, Any]]
    titles: Sequence[str]
    cells: Sequence[Sequence[str]]
    folder: Path | None = None  # of the runs of a study or sweep
    failures: Mapping[str, str] = field(default_factory=dict)  # message by name of a failed run

    def __repr__(self) -> str:
        width = shutil.get_terminal_size((100, 24)).columns
        table = fitted_table(self.titles, self.cells, SPARED, width, "the attribute rows")
        return "\n".join([table, *self.failure_lines()])

    def _repr_html_(self) -> str:
        lines = [table_line("th", self.titles), *(table_line("td", texts) for texts in self.cells)]
        notes = [f"<p>{html.escape(line)}</p>" for line in self.failure_lines()]
        return f"<table>{''.join(lines)}</table>{''.join(notes)}"

    def failure_lines(self) -> list[str]:
        return [f"failed: {name}: {message}" for name, message in self.failures.items()]

    def to_frame(self) -> Any:
        """The rows as a pandas DataFrame. Of a value over seeds: mean, and deviation as NAME_sd. Needs pandas."""
        pandas = import_pandas("the attribute rows, which has the same values")
        return pandas.DataFrame([flat_row(row) for row in self.rows])


def table_line(tag: str, texts: Sequence[str]) -> str:
    cells = [f"<{tag}>{html.escape(text)}</{tag}>" for text in texts]
    return f"<tr>{''.join(cells)}</tr>"


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without nested values: settings by their names, a spread as two numbers."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if key == "settings":
            flat |= value
        elif isinstance(value, tuple):
            flat[key], flat[f"{key}_sd"], _ = value
        elif isinstance(value, Mapping):
            flat |= {f"{key}_{name}": inner for name, inner in value.items()}
        else:
            flat[key] = value
    return flat
