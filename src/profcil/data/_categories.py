"""Columns of categories in a table: one column of zeros and ones for each value, or hashed ones where values are many.

The values are those of the training part. A value that it does not have, and a missing one, is all zeros.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from profcil.data._numbers import is_missing, is_number
from profcil.errors import DataError

MOST = 50  # values that get a column each; a column with more values is hashed
HASHED = 64  # columns of a hashed one
ROWS_PER_VALUE = 2  # on average, that a hashed column must have at least: names and texts are no categories


def is_categorical(values: Sequence[Any]) -> bool:
    """Whether most values of a column are words. A few words among numbers are mistakes, not categories."""
    if isinstance(values, np.ndarray):
        return False
    present = [value for value in values if not is_missing(value)]
    words = sum(not is_number(value) for value in present)
    return 2 * words > len(present)


def categories_of(values: Sequence[Any], name: str, where: object) -> tuple[str, ...]:
    """The values of a column in the training part, sorted; empty if there are so many that it is hashed."""
    present = [category(value) for value in values if not is_missing(value)]
    found = sorted(set(present))
    if len(found) <= MOST:
        return tuple(found)
    if len(present) < ROWS_PER_VALUE * len(found):
        raise DataError(
            f"{where} has {len(found)} different values in column '{name}' of {len(present)} rows, which is no "
            f"category; leave it out with --set 'own.ignore=[\"{name}\"]'"
        )
    return ()


def category(value: Any) -> str:
    return str(value).strip()


def one_hot(values: Sequence[Any], categories: Sequence[str]) -> np.ndarray:
    """A column as zeros and ones, [rows, categories]; [rows, HASHED] if there are no categories."""
    number = {name: i for i, name in enumerate(categories)}
    x = np.zeros((len(values), len(categories) or HASHED))
    for row, value in enumerate(values):
        text = category(value)
        if not categories and not is_missing(value):
            x[row, bucket(text)] = 1
        elif text in number:
            x[row, number[text]] = 1
    return x


def bucket(text: str) -> int:
    """The column of a hashed value."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % HASHED
