"""Two CSV files, rounds.csv and positions.csv, in RUN/logs or in the folder after `csv=`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profcil.loggers.base import FOLDER, Logger

STAGES = ("warmup", "dictionary", "stream")  # in the order of a run


class CsvLogger(Logger):
    def begin(self, settings: Mapping[str, Any], folder: Path) -> None:
        place = Path(self.target) if self.target else folder / FOLDER
        place.mkdir(parents=True, exist_ok=True)
        self.rounds = CsvFile(place / "rounds.csv", ("stage", "round"))
        self.positions = CsvFile(place / "positions.csv", ("position",))

    def round(self, number: int, values: Mapping[str, float]) -> None:
        stage = next(iter(values)).partition("/")[0]
        named = {name.partition("/")[2]: value for name, value in values.items()}
        self.rounds.add({"stage": stage, "round": number, **named})

    def position(self, number: int, values: Mapping[str, float]) -> None:
        named = {name.removeprefix("results/"): value for name, value in values.items()}
        self.positions.add({"position": number, **named})


class CsvFile:
    """A file with a line per round or position. A resumed run replaces the lines that it computes again."""

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        self.path = path
        self.keys = keys
        self.columns = list(keys)
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            with open(path, newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self.rows = list(reader)
                self.columns = list(reader.fieldnames or keys)

    def add(self, row: dict[str, Any]) -> None:
        """Appends a line, or writes the file anew where a column is new or later lines are there already."""
        new_columns = [name for name in row if name not in self.columns]
        is_computed_again = bool(self.rows) and self.order(self.rows[-1]) >= self.order(row)
        if is_computed_again:
            self.rows = [old for old in self.rows if self.order(old) < self.order(row)]
        must_rewrite = bool(new_columns) or is_computed_again
        self.columns += new_columns
        self.rows.append(row)
        with open(self.path, "w" if must_rewrite else "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns)
            if must_rewrite:
                writer.writeheader()
            writer.writerows(self.rows if must_rewrite else [row])

    def order(self, row: Mapping[str, Any]) -> tuple[int, ...]:
        """The place of a line in the run."""
        return tuple(STAGES.index(row[key]) if key == "stage" else int(row[key]) for key in self.keys)


LOGGER = CsvLogger
