"""Which column is the label, which the text, which the part, and which are features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from profcil.config import OwnSettings
from profcil.data._numbers import is_missing, is_number
from profcil.data.own.raw import PARTS
from profcil.data.own.records import NO_LABEL, Records
from profcil.errors import DataError, nearest

LABELS = ("label", "labels", "class", "target", "category", "intent")
LAST_LABELS = ("y",)  # taken if there is none of the others: a table may have columns x and y
TEXTS = ("text", "sentence", "content", "utterance", "question", "query", "message", "review", "document", "headline")
IMAGES = ("image", "img")
SPLITS = ("split", "part")
UNUSED = ("id", "index", "")  # numbers of rows; pandas writes its own without a name


def named(columns: Iterable[str], known: Sequence[str]) -> list[str]:
    return [name for name in columns if name.lower() in known]


def label_column(records: Records, settings: OwnSettings) -> str:
    """The column of the class."""
    names = list(records.columns)
    if settings.label:
        return given_column(settings.label, "label", records)
    found = named(names, LABELS) or named(names, LAST_LABELS)
    if len(found) > 1:
        raise DataError(
            f"{records.path} has labels in the columns {' and '.join(found)}; choose one with "
            f"--set own.label={found[0]}"
        )
    if not found:
        raise DataError(
            f"{records.path} has no column with the name label; choose one of {', '.join(names)} with "
            "--set own.label=NAME"
        )
    return found[0]


def given_column(name: str, setting: str, records: Records) -> str:
    if name not in records.columns:
        raise DataError(f"{records.path} has no column '{name}' (own.{setting}); {nearest(name, records.columns)}")
    return name


def split_column(records: Records) -> str:
    """The column that names the part of a row; empty if there is none."""
    found = named(records.columns, SPLITS)
    return found[0] if found else ""


def other_columns(records: Records, settings: OwnSettings, *used: str) -> list[str]:
    """The columns that may be inputs."""
    left_out = {*used, *settings.ignore, split_column(records)}
    return [name for name in records.columns if name not in left_out and name.lower() not in UNUSED]


def text_column(records: Records, settings: OwnSettings, others: Sequence[str]) -> str:
    """The column of texts; empty if the data is a table of numbers."""
    if settings.text:
        return given_column(settings.text, "text", records)
    if settings.modality == "table":
        return ""
    found = [name for name in named(others, TEXTS) if not is_number(first_value(records, name))]
    if len(found) > 1:
        raise DataError(
            f"{records.path} has texts in the columns {' and '.join(found)}; choose one with --set own.text={found[0]}"
        )
    if found:
        return found[0]
    if settings.modality == "text" and len(others) != 1:
        raise DataError(f"{records.path} has no column with the name text; choose one with --set own.text=NAME")
    alone = len(others) == 1 and not is_number(first_value(records, others[0]))
    return others[0] if alone or settings.modality == "text" else ""


def image_column(records: Records) -> str:
    """The column of image files, as datasets of Hugging Face have them; empty if there is none."""
    for name in named(records.columns, IMAGES):
        if isinstance(first_value(records, name), dict):
            return name
    return ""


def first_value(records: Records, name: str) -> Any:
    return next((value for value in records.columns[name] if not is_missing(value)), "")


def labels_of(records: Records, name: str) -> list[str]:
    """The class name of every row. Class ids become names where the file has names."""
    values = records.columns[name]
    names = records.class_names.get(name)
    labels = [names[int(value)] if names and has_class(value) else cell_text(value).strip() for value in values]
    for row, (label, value) in enumerate(zip(labels, values, strict=True)):
        if label == "" or label.lower() == "nan" or (names and not has_class(value)):
            raise DataError(f"{records.path} has no label in row {row + 1}; fill it in or remove the row")
    return labels


def has_class(value: Any) -> bool:
    """Whether a class id names a class; where a file has class names, -1 and None say that there is none."""
    return value is not None and value == value and int(value) != NO_LABEL


def is_unlabelled(records: Records, name: str) -> bool:
    """Whether a column of class ids says of every row that it has no class, as test parts of some datasets do."""
    return name in records.class_names and not any(map(has_class, records.columns[name]))


def cell_text(value: Any) -> str:
    """A cell as text; empty where the file has no value."""
    return "" if value is None or value != value else str(value)


def parts_of(records: Records, part: str) -> list[str]:
    """The part of every row: that of the file, or that of the column `split`; empty if neither says it."""
    if part:
        return [PARTS[part]] * len(records)
    column = split_column(records)
    if not column:
        return []
    values = [str(value).strip().lower() for value in records.columns[column]]
    for row, value in enumerate(values):
        if value not in PARTS:
            raise DataError(
                f"{records.path} has '{value}' in column '{column}', row {row + 1}; allowed is train, val or test"
            )
    return [PARTS[value] for value in values]
