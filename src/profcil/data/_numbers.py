"""Columns of text or numbers as an array. What is no number is named with its row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from profcil.errors import DataError

MISSING = ("", "nan", "na", "n/a", "none", "null", "?", "-")  # in lower case


def number_columns(columns: Mapping[str, Sequence[Any]], names: Sequence[str], where: object) -> np.ndarray:
    """The columns of these names as float64 [rows, columns]. `where` names their file in a message."""
    arrays = [number_column(columns[name], name, where) for name in names]
    return np.stack(arrays, axis=1) if arrays else np.zeros((0, 0))


def number_column(values: Sequence[Any], name: str, where: object) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError):
        raise fault(values, name, where) from None
    if not np.isfinite(array).all():
        row = int(np.flatnonzero(~np.isfinite(array))[0])
        raise missing(name, row, where)
    return array


def fault(values: Sequence[Any], name: str, where: object) -> DataError:
    """The error for the first value that is no number."""
    for row, value in enumerate(values):
        if is_missing(value):
            return missing(name, row, where)
        if not is_number(value):
            return DataError(
                f"{where} has '{shortened(value)}' in column '{name}', row {row + 1}, where a number is needed; write "
                f"the column as numbers, or leave it out with --set 'own.ignore=[\"{name}\"]'"
            )
    return DataError(f"{where} has a column '{name}' that cannot be read as numbers; write it as plain numbers")


def missing(name: str, row: int, where: object) -> DataError:
    return DataError(
        f"{where} has no value in column '{name}', row {row + 1}; fill the missing values or remove such rows"
    )


def is_missing(value: Any) -> bool:
    return value is None or str(value).strip().lower() in MISSING


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def shortened(value: Any, limit: int = 40) -> str:
    text = str(value)
    return text if len(text) <= limit else text[:limit] + "..."
