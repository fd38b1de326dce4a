"""Files with rows: CSV, TSV, JSON, JSONL, Parquet and datasets of Hugging Face, as columns by name."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profcil.errors import DataError

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
LONGEST_CELL = 2**24  # characters; Python's own limit is too small for long documents
SEPARATORS = (";", "\t", "|")  # of a CSV, beside the comma
COMMA_NUMBER = re.compile(r"[+-]?\d+(,\d+)?([eE][+-]?\d+)?")
NO_LABEL = -1  # the class id of a row without a class, in datasets of Hugging Face


@dataclass(frozen=True)
class Records:
    """Columns of equal length, by name."""

    path: Path
    columns: dict[str, Sequence[Any]]
    class_names: dict[str, tuple[str, ...]]  # names of the classes of a column of class ids, where the file has them

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def read_records(path: Path, encoding: str = "utf-8") -> Records:
    """The rows of a file, by its suffix. A file that is not in this encoding raises a UnicodeDecodeError."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return read_parquet(path)
    if suffix in (".json", ".jsonl"):
        return Records(path, columns_of(read_json(path, encoding), path), {})
    return Records(path, read_csv(path, encoding), {})


def read_csv(path: Path, encoding: str = "utf-8") -> dict[str, Sequence[str]]:
    """The columns of a CSV file with a header, or of a TSV file."""
    csv.field_size_limit(LONGEST_CELL)
    if encoding.lower() in ("utf-8", "utf8"):
        encoding = "utf-8-sig"
    with path.open(encoding=encoding, newline="") as file:
        separator = "\t" if path.suffix.lower() == ".tsv" else separator_of(file.readline())
        file.seek(0)
        reader = csv.reader(file, delimiter=separator)
        header = [name.strip() for name in next(reader, [])]
        rows = [row for row in reader if row]
    check_header(header, path)
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise DataError(
                f"{path} has {len(row)} cells in row {number + 1} where its header has {len(header)}; put cells that "
                "contain the separator into double quotes"
            )
    columns: Iterable[Sequence[str]] = zip(*rows, strict=True) if rows else ([] for _ in header)
    if separator == ";":
        columns = map(with_points, columns)
    return dict(zip(header, columns, strict=True))


def with_points(values: Sequence[str]) -> Sequence[str]:
    """A column with decimal points, if it has decimal commas throughout, as tables with semicolons may have."""
    present = [value for value in values if value.strip()]
    if any("," in value for value in present) and all(COMMA_NUMBER.fullmatch(value.strip()) for value in present):
        return [value.replace(",", ".") for value in values]
    return values


def separator_of(header: str) -> str:
    """A comma, or what separates the columns of a header that has no comma: a semicolon, a tab or a bar."""
    if len(next(csv.reader([header]), [])) > 1:
        return ","
    columns = {separator: len(next(csv.reader([header], delimiter=separator), [])) for separator in SEPARATORS}
    most = max(SEPARATORS, key=lambda separator: columns[separator])
    return most if columns[most] > 1 else ","


def check_header(header: Sequence[str], path: Path) -> None:
    if not any(header):
        raise DataError(f"{path} is empty; it needs a header with the names of its columns")
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"{path} has two columns with the name '{name}'; rename or remove one of them")


def read_json(path: Path, encoding: str = "utf-8") -> list[Any]:
    """The objects of a JSON list, or of a file with one object per line."""
    text = path.read_text(encoding=encoding)
    try:
        if path.suffix.lower() == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} cannot be read as JSON ({error}); correct that place") from None
    if not isinstance(rows, list):
        raise DataError(f"{path} is not a list of objects; write [{{...}}, ...], or one object per line in a .jsonl")
    return rows


def columns_of(rows: Sequence[Any], path: Path) -> dict[str, Sequence[Any]]:
    """The columns of objects, which have the keys of the first one."""
    if not rows or not isinstance(rows[0], dict):
        raise DataError(f'{path} has no objects; write for example {{"text": "...", "label": "..."}}')
    names = list(rows[0])
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(names):
            keys = ", ".join(row) if isinstance(row, dict) else "none"
            raise DataError(
                f"{path} has the keys {keys} in row {number + 1} where the first row has {', '.join(names)}; give all "
                "rows the same keys"
            )
    return {name: [row[name] for row in rows] for name in names}


def pyarrow(module: str) -> Any:
    """A module of pyarrow, which is an extra."""
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ImportError:
        raise DataError(
            "Parquet files and datasets of Hugging Face need pyarrow; install it with pip install 'profcil[parquet]'"
        ) from None


def read_parquet(path: Path) -> Records:
    read = pyarrow("parquet").read_table
    try:
        table = read(path)
    except (ValueError, OSError) as error:  # pyarrow's own errors are of these two kinds
        reason = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as Parquet ({reason}); write it again") from None
    return Records(path, arrow_columns(table), {})


def arrow_columns(table: Any) -> dict[str, Sequence[Any]]:
    """The columns of an Arrow table: numbers as arrays, all else as lists."""
    types = pyarrow("types")
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        is_number = types.is_integer(column.type) or types.is_floating(column.type)
        columns[name] = column.to_numpy() if is_number else column.to_pylist()
    return columns


def read_hugging_face(folder: Path) -> list[tuple[str, Records]]:
    """The parts of a dataset that `save_to_disk` wrote, with their names; a dataset without parts has the name ""."""
    splits = folder / "dataset_dict.json"
    try:
        if not splits.exists():
            return [("", read_arrow_folder(folder))]
        names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
        return [(name, read_arrow_folder(folder / name)) for name in names]
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(f"{folder} is no complete dataset of Hugging Face ({reason}); save it to disk again") from None


def read_arrow_folder(folder: Path) -> Records:
    """One part: Arrow files in the stream format, and a description of its columns."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    if state.get("_indices_files"):
        raise DataError(f"{folder} was saved with a selection of rows; save it again after `dataset.flatten_indices()`")
    ipc = pyarrow("ipc")
    tables = []
    for entry in state["_data_files"]:
        with ipc.open_stream(str(folder / entry["filename"])) as stream:
            tables.append(stream.read_all())
    columns: dict[str, Sequence[Any]] = {}
    for table in tables:
        for name, values in arrow_columns(table).items():
            columns[name] = [*columns.get(name, ()), *values]
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    names = {}
    for key, feature in (info.get("features") or {}).items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names[key] = tuple(feature["names"])
    return Records(folder, columns, names)
