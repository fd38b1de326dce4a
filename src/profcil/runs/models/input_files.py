"""Reads files, folders and texts as the inputs of a trained model, by its modality."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.config import OwnSettings
from profcil.data._numbers import number_columns
from profcil.data.own.arrays import as_inputs
from profcil.data.own.columns import (
    LABELS,
    cell_text,
    image_column,
    is_unlabelled,
    label_column,
    labels_of,
    named,
    other_columns,
    text_column,
)
from profcil.data.own.forms import explained, read_raw, record_parts
from profcil.data.own.graphs import read_edges, read_nodes
from profcil.data.own.images import IMAGE_SUFFIXES, image_files
from profcil.data.own.records import SUFFIXES, Records
from profcil.errors import DataError
from profcil.io.npy import read_npz
from profcil.runs.models.labelled_inputs import GivenInputs, chosen_examples
from profcil.runs.models.trained_model import KINDS, Model

ARRAYS = ".npz"
LINES = ".txt"  # one text per line
STDIN = "-"
LABEL = "label"  # the column of labels, and
TEXT = "text"  # that of texts, where there is one of this name and no other was chosen


@contextmanager
def explain_content(path: object, kind: str) -> Iterator[None]:
    """Turns an error about the content of a file into one sentence."""
    try:
        yield
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} cannot be read as {kind} ({reason}); docs/models.md describes the formats") from None


def existing(item: str, kind: str) -> Path:
    """The path of an input, which must exist."""
    path = Path(item)
    if not path.exists():
        raise DataError(f"{item} does not exist; give {kind}")
    return path


def rows_in(path: Path, settings: OwnSettings, labelled: bool) -> list[Records]:
    """The rows of a file or dataset; empty if the path is none. With `labelled`, parts without labels are left out."""
    with explained(path, settings.encoding):
        parts = [records for _, records in record_parts(path, settings.encoding)]
    if labelled:
        parts = [records for records in parts if not is_unlabelled(records, column_of_labels(records, settings))]
    return parts


def labels_in(records: Records, settings: OwnSettings) -> list[str]:
    """The class of every row."""
    return labels_of(records, column_of_labels(records, settings))


def column_of_labels(records: Records, settings: OwnSettings) -> str:
    """The column that the model was trained with, else `label`, else one of such a name."""
    chosen = has_column(settings.label, records) or LABEL not in records.columns
    return label_column(records, settings) if chosen else LABEL


def has_column(chosen: str, records: Records) -> bool:
    """Whether a column was chosen and is there."""
    return bool(chosen) and chosen in records.columns


def numbered(item: object, count: int) -> list[str]:
    """Names of rows, which are counted from 1."""
    return [f"{item}:{number}" for number in range(1, count + 1)]


def arrays_in(path: Path, labelled: bool, settings: OwnSettings, modality: str) -> tuple[Tensor, list[str]]:
    """The inputs of an npz file and, with `labelled`, their labels."""
    if labelled:
        raw = read_raw(path, settings)
        check_modality(raw.modality, modality, path)
        return torch.from_numpy(raw.inputs), raw.labels
    with explain_content(path, "arrays"):
        x = as_inputs(read_npz(path)["x"], path)
    check_modality("table" if x.ndim == 2 else "image", modality, path)
    return torch.from_numpy(x), []


def check_modality(given: str, wanted: str, path: Path) -> None:
    if given != wanted:
        raise DataError(f"this is a model of {KINDS[wanted]}, and {path} has {KINDS[given]}; give {KINDS[wanted]}")


# -- images -----------------------------------------------------------------------------------------------------------


def read_images(model: Model, items: Sequence[str], labelled: bool, settings: OwnSettings) -> GivenInputs:
    """Image files, or one dataset of images. Images of another size are resized."""
    first = existing(items[0], "image files or folders of them, which this model takes")
    if len(items) == 1 and first.suffix.lower() == ARRAYS:
        x, labels = arrays_in(first, labelled, settings, "image")
        return GivenInputs(numbered(first, len(x)), (x,), labels)
    if len(items) == 1 and (parts := rows_in(first, settings, labelled)):
        return images_of_rows(model, parts, labelled, settings)
    paths: list[Path] = []
    labels = []
    for item in items:
        path = existing(item, "image files or folders of them, which this model takes")
        found = image_files(path) if path.is_dir() else [path]
        paths += found
        labels += [folder_label(file, path, model.names) for file in found]
    for path in paths:
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            raise DataError(f"this is a model of images, and {path} is not an image; give {', '.join(IMAGE_SUFFIXES)}")
    return GivenInputs([str(path) for path in paths], (model.read_images(paths),), labels if labelled else [])


def folder_label(file: Path, root: Path, names: Sequence[str]) -> str:
    """The class of an image: of the folders from the given one down to it the first with the name of a class, else the
    one that it is in."""
    below = file.parent.relative_to(root).parts if root.is_dir() else ()
    return next((name for name in below if name in names), file.parent.name)


def images_of_rows(model: Model, parts: Sequence[Records], labelled: bool, settings: OwnSettings) -> GivenInputs:
    """The images in a column of a dataset."""
    column = image_column(parts[0])
    if not column:
        raise DataError(f"this is a model of images, and {parts[0].path} has no column of images; give images")
    files = [value["bytes"] or value["path"] for part in parts for value in part.columns[column]]
    names = [name for part in parts for name in numbered(part.path, len(part))]
    labels = [label for part in parts for label in labels_in(part, settings)] if labelled else []
    return GivenInputs(names, (model.read_images(files),), labels)


# -- texts ------------------------------------------------------------------------------------------------------------


def read_texts(model: Model, items: Sequence[str], labelled: bool, settings: OwnSettings) -> GivenInputs:
    """Texts of the command line, of files and of standard input."""
    texts: list[str] = []
    labels: list[str] = []
    for item in items:
        if item == STDIN:
            texts += lines_of(sys.stdin.read())
        elif not names_file(item):
            texts.append(item)
        elif Path(item).suffix.lower() == LINES:
            texts += lines_in(existing(item, "texts, or a file of texts"), settings)
        else:
            parts = rows_in(existing(item, "texts, or a file of texts"), settings, labelled)
            if not parts:
                raise DataError(f"this is a model of texts, and {item} is none; give texts, or a file of them")
            for records in parts:
                texts += texts_in(records, settings)
                labels += labels_in(records, settings) if labelled else []
    if labelled and len(labels) != len(texts):
        raise DataError(f"{', '.join(items)} cannot be read as texts with labels; give a file with a column of labels")
    return GivenInputs(texts, (model.read_texts(texts),), labels)


def names_file(item: str) -> bool:
    """Whether an argument is a path and not a text that ends like one, such as "open it with notes.txt"."""
    path = Path(item)
    try:
        if path.exists():
            return True
    except OSError:  # a text may be too long for a path
        return False
    suffixes = (LINES, *SUFFIXES, *IMAGE_SUFFIXES)
    return path.suffix.lower() in suffixes and not any(map(str.isspace, item))


def lines_in(path: Path, settings: OwnSettings) -> list[str]:
    encoding = "utf-8-sig" if settings.encoding == "utf-8" else settings.encoding
    with explained(path, settings.encoding):
        return lines_of(path.read_text(encoding=encoding))


def lines_of(text: str) -> list[str]:
    """One text per line; empty lines are left out."""
    return [line for line in text.splitlines() if line.strip()]


def texts_in(records: Records, settings: OwnSettings) -> list[str]:
    """The texts of rows, by the column that the model was trained with, `text`, or a column of such a name."""
    column = TEXT
    if has_column(settings.text, records) or TEXT not in records.columns:
        of_label = [settings.label] if settings.label else named(records.columns, LABELS)
        others = other_columns(records, settings, *of_label)
        column = text_column(records, replace(settings, modality="text"), others)
    return [cell_text(value) for value in records.columns[column]]


# -- tables -----------------------------------------------------------------------------------------------------------


def read_tables(model: Model, items: Sequence[str], labelled: bool, settings: OwnSettings) -> GivenInputs:
    """Rows of a table. Columns are found by name if the model has names for them."""
    inputs: list[Tensor] = []
    names: list[str] = []
    labels: list[str] = []
    for item in items:
        path = existing(item, "a file with the columns of this model")
        if path.suffix.lower() == ARRAYS:
            x, own_labels = arrays_in(path, labelled, settings, "table")
            found = [(x.float(), own_labels)]
        else:
            found = [
                (features_of(model, records), labels_in(records, settings) if labelled else [])
                for records in rows_in(path, settings, labelled)
            ]
        if not found:
            raise DataError(f"this is a model of tables, and {item} is not a table; give {', '.join(SUFFIXES)}")
        inputs += [x for x, _ in found]
        labels += [label for _, own_labels in found for label in own_labels]
        names += numbered(item, sum(len(x) for x, _ in found))
    return GivenInputs(names, (torch.cat(inputs),), labels)


def features_of(model: Model, records: Records, *unused: str) -> Tensor:
    """The features of rows, [rows, features]: by name if the model has names for them, else in the order of columns."""
    form = model.expect(model.modality)
    columns: Mapping[str, Sequence[Any]] = records.columns
    (width,) = form.shape
    if form.columns:
        return form.encode_columns(columns, records.path)
    present = [name for name in columns if name not in ("id", LABEL, *unused)]
    if len(present) != width:
        raise DataError(
            f"{records.path} has {len(present)} features where the model has {width}; give the columns that the model "
            "was trained on"
        )
    return torch.from_numpy(number_columns(columns, present, records.path)).to(model.like[0].dtype)


# -- graphs -----------------------------------------------------------------------------------------------------------


def read_graph(model: Model, items: Sequence[str], labelled: bool, settings: OwnSettings) -> GivenInputs:
    """All nodes of one graph; with `labelled`, those that have a label."""
    if len(items) > 1:
        raise DataError("a model of graphs reads one graph at a time; give one folder")
    path = existing(items[0], "a folder with nodes.csv and edges.csv")
    if path.suffix.lower() == ARRAYS:
        raw = read_raw(path, settings)
        check_modality(raw.modality, "graph", path)
        assert raw.edges is not None
        x = torch.from_numpy(np.ascontiguousarray(raw.inputs, dtype=np.float32))
        names = [str(node) for node in range(len(x))]
        return graph_inputs(names, x, raw.edges, raw.labels if labelled else [])
    for name in ("nodes.csv", "edges.csv"):
        if not (path / name).is_file():
            raise DataError(f"this is a model of graphs, and {path} has no {name}; give a folder with it")
    with explained(path, settings.encoding):
        nodes = read_nodes(path, settings)
        edges = read_edges(path / "edges.csv", nodes.columns["id"], settings.encoding)
    ids = [str(node) for node in nodes.columns["id"]]
    if not labelled:
        return graph_inputs(ids, features_of(model, nodes, *named(nodes.columns, LABELS)), edges, [])
    label = label_column(nodes, settings)
    labels = [str(value).strip() for value in nodes.columns[label]]
    given = graph_inputs(ids, features_of(model, nodes, label), edges, labels)
    return chosen_examples(given, [row for row, name in enumerate(labels) if name])


def graph_inputs(names: list[str], x: Tensor, edges: np.ndarray, labels: list[str]) -> GivenInputs:
    return GivenInputs(names, (x, torch.from_numpy(edges), torch.arange(len(x))), labels)
