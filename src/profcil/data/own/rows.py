"""Texts, tables and images from files with rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profcil.config import OwnSettings
from profcil.data._categories import is_categorical
from profcil.data._numbers import number_columns
from profcil.data.own.columns import (
    image_column,
    label_column,
    labels_of,
    other_columns,
    parts_of,
    split_column,
    text_column,
)
from profcil.data.own.images import image_shape
from profcil.data.own.raw import Raw
from profcil.data.own.records import Records
from profcil.errors import DataError

Parts = Sequence[tuple[str, Records]]  # the name of a part ("" = not named), and its rows


def read_rows(parts: Parts, settings: OwnSettings) -> Raw:
    """Labelled rows of one file or of several, one for each part. All have the columns of the first."""
    check_parts(parts)
    first = parts[0][1]
    label = label_column(first, settings)
    labels: list[str] = []
    drawn: list[str] = []
    for part, records in parts:
        labels += labels_of(records, label)
        drawn += parts_of(records, part)
    names = first.class_names.get(label, ())
    if image := image_column(first):
        files = [value["bytes"] or value["path"] for _, records in parts for value in records.columns[image]]
        shape, notes = image_shape(files, settings, first.path)
        return Raw("image", files, labels, drawn, shape=shape, names=names, notes=notes)
    others = other_columns(first, settings, label)
    if text := text_column(first, settings, others):
        texts = [str(value) for _, records in parts for value in records.columns[text]]
        return Raw("text", texts, labels, drawn, names=names)
    if not others:
        raise DataError(f"{first.path} has no column beside '{label}'; add a column of texts or columns of numbers")
    if any(is_categorical(first.columns[name]) for name in others):
        table = {name: [value for _, records in parts for value in records.columns[name]] for name in others}
        return Raw("table", table, labels, drawn, columns=tuple(others), names=names)
    numbers = [number_columns(records.columns, others, records.path) for _, records in parts]
    return Raw("table", np.concatenate(numbers), labels, drawn, columns=tuple(others), names=names)


def check_parts(parts: Parts) -> None:
    """Checks that every part has rows and the columns of the first."""
    first = parts[0][1]
    for name, records in parts:
        if not len(records):
            raise DataError(f"{records.path} has no rows; put labelled examples there")
        lacking = [column for column in first.columns if column not in records.columns]
        if lacking:
            raise DataError(f"{records.path} lacks the column '{lacking[0]}', which {first.path} has; add it")
        if name and split_column(records):
            raise DataError(
                f"{records.path} has the column '{split_column(records)}', but its own name says its part; remove one"
            )
