"""Reads inputs for a trained model: images, texts, tables and graphs, with or without labels.

images   image files, and folders with images at any depth; labelled: a folder with one folder of images per class
texts    texts themselves, a .txt file with one text per line, or a .csv, .tsv, .json or .jsonl file with a field `text`
         and, where labelled, a field `label`; `-` is standard input, one text per line
tables   .csv or .tsv files with the columns that the model was trained on, and `label` where labelled
a graph  a folder with nodes.csv (id, features, and `label` where labelled) and edges.csv (source, target)
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profcil.errors import ConfigError, DataError, nearest
from profcil.runs.models.trained_model import KINDS, Model

if TYPE_CHECKING:
    from torch import Tensor

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
TABLE_SUFFIXES = (".csv", ".tsv")
TEXT_SUFFIXES = (".txt", ".json", ".jsonl", *TABLE_SUFFIXES)
STDIN = "-"


@dataclass(frozen=True)
class GivenInputs:
    """Inputs in the form that a model takes."""

    names: list[str]  # one for each example: a path, a text, a row number or a node's id
    inputs: tuple[Tensor, ...]
    labels: list[str]  # class names; empty if the inputs have none

    def __len__(self) -> int:
        return len(self.names)


def read_inputs(model: Model, items: Sequence[str], labelled: bool = False) -> GivenInputs:
    """The inputs that a command line names. With `labelled`, each must have a label."""
    if not items:
        raise ConfigError(f"no inputs were given; name {KINDS.get(model.modality, model.modality)} to predict")
    form = model.expect(model.modality)
    readers: Mapping[str, Callable[[Model, Sequence[str], bool], GivenInputs]] = {
        "image": read_images,
        "text": read_texts,
        "table": read_tables,
        "graph": read_graph,
    }
    if form.modality not in readers:
        raise DataError(f"inputs of the modality '{form.modality}' cannot be read from files; use profcil.load_model")
    given = readers[form.modality](model, items, labelled)
    if not len(given):
        raise DataError(f"{', '.join(items)} has no inputs; give a file or folder with some")
    return given


def class_ids(model: Model, labels: Iterable[str], source: object) -> list[int]:
    """The class ids of labels. A label that the model does not know is an error."""
    ids = {name: i for i, name in enumerate(model.names)}
    found = []
    for label in labels:
        if label not in ids:
            advice = nearest(label, model.names)
            raise DataError(f"{source} has the label '{label}', which is not a class of this model; {advice}")
        found.append(ids[label])
    return found


@contextmanager
def explain_content(path: object, kind: str) -> Iterator[None]:
    """Turns an error about the content of a file into one sentence."""
    try:
        yield
    except (UnicodeDecodeError, LookupError, ValueError, TypeError, AttributeError, csv.Error) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} cannot be read as {kind} ({reason}); docs/models.md describes the formats") from None


def existing(item: str, kind: str) -> Path:
    """The path of an input, which must exist."""
    path = Path(item)
    if not path.exists():
        raise DataError(f"{item} does not exist; give {kind}")
    return path


# -- images -----------------------------------------------------------------------------------------------------------


def read_images(model: Model, items: Sequence[str], labelled: bool) -> GivenInputs:
    """Image files. A label is the name of the folder that an image is in."""
    paths: list[Path] = []
    for item in items:
        path = existing(item, "image files or folders of them, which this model takes")
        paths += image_files(path) if path.is_dir() else [path]
    other = [path for path in paths if path.suffix.lower() not in IMAGE_SUFFIXES]
    if other:
        raise DataError(f"this is a model of images, and {other[0]} is not an image; give {', '.join(IMAGE_SUFFIXES)}")
    labels = [path.parent.name for path in paths] if labelled else []
    return GivenInputs([str(path) for path in paths], (model.read_images(paths),), labels)


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)


# -- texts ------------------------------------------------------------------------------------------------------------


def read_texts(model: Model, items: Sequence[str], labelled: bool) -> GivenInputs:
    """Texts of the command line, of files and of standard input."""
    rows: list[Mapping[str, Any]] = []
    for item in items:
        path = Path(item)
        if item == STDIN:
            rows += lines_of(sys.stdin.read())
        elif names_file(item, TEXT_SUFFIXES):
            rows += text_rows(existing(item, "texts, or a file of texts"))
        elif names_file(item, IMAGE_SUFFIXES) or is_folder(path):
            raise DataError(f"this is a model of texts, and {item} is none; give texts, or a file of them")
        else:
            rows.append({"text": item})
    source = ", ".join(items)
    with explain_content(source, "texts with labels" if labelled else "texts"):
        texts = [str(row["text"]) for row in rows]
        labels = [str(row["label"]) for row in rows] if labelled else []
    return GivenInputs(texts, (model.read_texts(texts),), labels)


def names_file(item: str, suffixes: Sequence[str]) -> bool:
    """Whether an argument is a path and not a text that ends like one, such as "open it with notes.txt"."""
    path = Path(item)
    if path.suffix.lower() not in suffixes:
        return False
    return not any(map(str.isspace, item)) or path.exists()


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a text may be too long for a path
        return False


def text_rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a file of texts."""
    with explain_content(path, "texts"):
        if path.suffix.lower() == ".txt":
            return lines_of(path.read_text(encoding="utf-8-sig"))
        return list(rows_of(path))


def lines_of(text: str) -> list[Mapping[str, Any]]:
    """One text per line; empty lines are left out."""
    return [{"text": line} for line in text.splitlines() if line.strip()]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file by column name, read as own data is."""
    from profcil.data.own.records import read_records

    columns = read_records(path).columns
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


# -- tables -----------------------------------------------------------------------------------------------------------


def read_tables(model: Model, items: Sequence[str], labelled: bool) -> GivenInputs:
    """Rows of numbers. Columns are found by name if the model has names for them."""
    rows: list[Mapping[str, str]] = []
    names: list[str] = []
    for item in items:
        path = existing(item, "a .csv or .tsv file with the columns of this model")
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise DataError(f"this is a model of tables, and {item} is not a table; give a .csv or .tsv file")
        with explain_content(path, "a table"):
            own = rows_of(path)
        rows += own
        names += [f"{item}:{number}" for number in range(1, len(own) + 1)]
    source = ", ".join(items)
    with explain_content(source, "a table"):
        x = numbers_of(model, rows, source)
        labels = [row["label"] for row in rows] if labelled else []
    return GivenInputs(names, (x,), labels)


def numbers_of(model: Model, rows: Sequence[Mapping[str, str]], source: object) -> Tensor:
    """The features of rows, [rows, features]: by name if the model has names for them, else in the order of columns."""
    import torch

    form = model.expect(model.modality)
    present = list(rows[0]) if rows else []
    if form.columns and rows:
        return form.encode_columns({name: [row[name] for row in rows] for name in present}, source)
    columns = [name for name in present if name not in ("id", "label")]
    (width,) = form.shape
    if rows and len(columns) != width:
        raise ValueError(f"it has {len(columns)} features where the model has {width}")
    values = [[float(row[column]) for column in columns] for row in rows]
    return torch.tensor(values, dtype=model.like[0].dtype).reshape(len(rows), width)


# -- graphs -----------------------------------------------------------------------------------------------------------


def read_graph(model: Model, items: Sequence[str], labelled: bool) -> GivenInputs:
    """All nodes of one graph."""
    import numpy as np
    import torch

    from profcil.data._graphs import undirected

    if len(items) > 1:
        raise DataError("a model of graphs reads one graph at a time; give one folder")
    folder = existing(items[0], "a folder with nodes.csv and edges.csv")
    for name in ("nodes.csv", "edges.csv"):
        if not (folder / name).is_file():
            raise DataError(f"this is a model of graphs, and {folder} has no {name}; give a folder with it")
    with explain_content(folder, "a graph"):
        rows = rows_of(folder / "nodes.csv")
        ids = [row["id"] for row in rows]
        number = {id: i for i, id in enumerate(ids)}
        x = numbers_of(model, rows, folder)
        ends = [(number[row["source"]], number[row["target"]]) for row in rows_of(folder / "edges.csv")]
        edges = undirected(np.array(ends, dtype=np.int64).reshape(-1, 2).T, len(rows))
        labels = [row["label"] for row in rows] if labelled else []
    return GivenInputs(ids, (x, torch.from_numpy(edges), torch.arange(len(rows))), labels)


def choose_nodes(given: GivenInputs, wanted: Sequence[str]) -> GivenInputs:
    """The nodes with these ids, in the same graph."""
    import torch

    number = {id: i for i, id in enumerate(given.names)}
    missing = [id for id in wanted if id not in number]
    if missing:
        raise DataError(f"the graph has no node '{missing[0]}'; {nearest(missing[0], given.names[:1000])}")
    rows = [number[id] for id in wanted]
    x, edges, _ = given.inputs
    labels = [given.labels[row] for row in rows] if given.labels else []
    return GivenInputs(list(wanted), (x, edges, torch.tensor(rows)), labels)
