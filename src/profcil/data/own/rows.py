"""Texts, tables and images from files with rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profcil.config import OwnSettings
from profcil.data._categories import is_categorical
from profcil.data._numbers import number_columns
from profcil.data.own.columns import (
    cell_text,
    image_column,
    is_unlabelled,
    label_column,
    labels_of,
    other_columns,
    parts_of,
    split_column,
    text_column,
)
from profcil.data.own.images import image_shape
from profcil.data.own.raw import PARTS, Raw
from profcil.data.own.records import Records
from profcil.errors import DataError

Parts = Sequence[tuple[str, Records]]  # the name of a part ("" = not named), and its rows


def read_rows(parts: Parts, settings: OwnSettings) -> Raw:
    """Labelled rows of one file or of several, one for each part. All have the columns of the first."""
    parts, left_out = known_parts(parts)
    check_parts(parts)
    first = parts[0][1]
    label = label_column(first, settings)
    parts, unlabelled = labelled_parts(parts, label)
    notes = (*left_out, *unlabelled)
    labels: list[str] = []
    drawn: list[str] = []
    for part, records in parts:
        labels += labels_of(records, label)
        drawn += parts_of(records, part)
    names = first.class_names.get(label, ())
    if image := image_column(first):
        files = [value["bytes"] or value["path"] for _, records in parts for value in records.columns[image]]
        shape, resized = image_shape(files, settings, first.path)
        return Raw("image", files, labels, drawn, shape=shape, names=names, notes=(*notes, *resized))
    others = other_columns(first, settings, label)
    if text := text_column(first, settings, others):
        texts = [cell_text(value) for _, records in parts for value in records.columns[text]]
        return Raw("text", texts, labels, drawn, names=names, notes=notes)
    if not others:
        raise DataError(f"{first.path} has no column beside '{label}'; add a column of texts or columns of numbers")
    if any(is_categorical(first.columns[name]) for name in others):
        table = {name: [value for _, records in parts for value in records.columns[name]] for name in others}
        return Raw("table", table, labels, drawn, columns=tuple(others), names=names, notes=notes)
    numbers = [number_columns(records.columns, others, records.path) for _, records in parts]
    return Raw("table", np.concatenate(numbers), labels, drawn, columns=tuple(others), names=names, notes=notes)


def known_parts(parts: Parts) -> tuple[Parts, tuple[str, ...]]:
    """The parts whose names say what they are for, and a note for each of the others."""
    known = [(name, records) for name, records in parts if not name or name in PARTS]
    notes = tuple(
        f"{records.path} is not used: its name is none of train, val and test"
        for name, records in parts
        if name and name not in PARTS
    )
    if not known:
        raise DataError(f"{parts[0][1].path.parent} has no part train; rename the part to train on")
    return known, notes


def labelled_parts(parts: Parts, label: str) -> tuple[Parts, tuple[str, ...]]:
    """The parts that have labels, and a note for each that has none."""
    labelled = [(name, records) for name, records in parts if not is_unlabelled(records, label)]
    notes = tuple(
        f"{records.path} is not used: none of its rows has a label"
        for name, records in parts
        if is_unlabelled(records, label)
    )
    if not labelled:
        raise DataError(f"{parts[0][1].path} has no row with a label; give labelled examples")
    return labelled, notes


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
