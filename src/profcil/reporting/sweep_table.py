"""A sweep as one table. Its columns are the settings in which the runs differ, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profcil.reporting.study_table import method_of, table_cells
from profcil.runs.differences import plain_text, short_names

NAMES = ("dataset", "setting", "method")


def sweep_cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of the rows of `study_table.summarise`."""
    named = [{"dataset": row["dataset"], "setting": row["setting"], "method": method_of(row)} for row in rows]
    settings = [names | row["settings"] for names, row in zip(named, rows, strict=True)]
    keys = [key for key in dict.fromkeys(key for row in settings for key in row) if differs(settings, key)]
    titles, lines = table_cells(rows)
    measured = [number for number, title in enumerate(titles) if title not in (*NAMES, "seeds")]
    cells = []
    for row, own, line in zip(rows, settings, lines, strict=True):
        values = [plain_text(own.get(key, "")) for key in keys]
        cells.append([*values, seeds_text(row), *(line[number] for number in measured)])
    return [*short_names(keys), "seeds", *(titles[number] for number in measured)], cells


def seeds_text(row: dict[str, Any]) -> str:
    """The number of finished seeds, and of all if some are missing."""
    return str(row["seeds"]) if row["seeds"] == row["planned"] else f"{row['seeds']} of {row['planned']}"


def differs(rows: Sequence[dict[str, Any]], key: str) -> bool:
    return len({plain_text(row.get(key, "")) for row in rows}) > 1
