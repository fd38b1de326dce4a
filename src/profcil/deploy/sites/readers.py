"""Reads a site's own data in common formats: texts in CSV or JSON, images in folders, a graph in CSV tables.

texts    a CSV with the columns text and label, a JSON list of {"text", "label"}, or one such object per line (.jsonl)
images   a folder with one folder of images per class
a graph  a folder with nodes.csv (id, label, then one column per feature) and edges.csv (source, target)
a table  a CSV or JSON file with the column label and columns of numbers

The files are read by `profcil.data.own`, which reads them for simulations, too. Here the federation says what the
classes are, and how an input is encoded.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from profcil.config import OwnSettings
from profcil.data._pixels import read_image
from profcil.data.bundle import Examples, Nodes, Rows
from profcil.data.own.graphs import read_graph_folder
from profcil.data.own.images import class_images
from profcil.data.own.records import read_records
from profcil.errors import DataError, nearest

NOT_DECLARED = -1  # the label of a class that the federation may declare later

if TYPE_CHECKING:
    from profcil.deploy.sites.federation import Federation


def read_examples(path: Path, federation: Federation) -> Examples:
    """The labelled data at a path, in the form that the federation agreed on."""
    if not path.exists():
        raise DataError(f"{path} does not exist; put the data there or change the manifest")
    readers: Mapping[str, Callable[[Path, Federation], Examples]] = {
        "text": read_texts,
        "image": read_images,
        "graph": read_graph,
        "table": read_table,
    }
    try:
        examples = readers[federation.modality](path, federation)
    except (UnicodeDecodeError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read as {federation.modality} data ({error}); docs/deployment.md describes the format"
        ) from None
    if federation.grows:
        examples = known_by_class(examples)
    if not len(examples):
        raise DataError(f"{path} has no examples; put labelled data there")
    return examples


def known_by_class(examples: Examples) -> Examples:
    """The examples of known classes, sorted by class id. Classes that are declared later have larger ids, so the number
    of an example stays the same."""
    order = examples.y.sort(stable=True).indices
    order = order[examples.y[order] != NOT_DECLARED]
    if isinstance(examples, Nodes):
        return Nodes(examples.x, examples.edges, examples.y[order], examples.nodes[order])
    return Rows(examples.x[order], examples.y[order])


def read_test_examples(path: Path, federation: Federation) -> Examples:
    """The labelled test data of a federation, which must have examples of every class."""
    examples = read_examples(path, federation)
    missing = sorted(set(range(len(federation.classes))) - set(examples.y.tolist()))
    if missing:
        name = federation.classes[missing[0]]
        raise DataError(f"{path} has no example of class '{name}'; the test data must have examples of every class")
    return examples


def class_id(name: str, federation: Federation, path: Path) -> int:
    if name not in federation.classes:
        if federation.grows:
            return NOT_DECLARED
        raise DataError(
            f"{path} has the label '{name}', which is not a class of the federation; "
            f"{nearest(name, federation.classes)}"
        )
    return federation.classes.index(name)


def read_texts(path: Path, federation: Federation) -> Rows:
    columns = read_records(path).columns
    x = federation.input_format().encode_texts([str(text) for text in columns["text"]])
    labels = [class_id(str(label), federation, path) for label in columns["label"]]
    return Rows(x, torch.tensor(labels, dtype=torch.long))


def read_table(path: Path, federation: Federation) -> Rows:
    columns = read_records(path).columns
    labels = [class_id(str(label), federation, path) for label in columns["label"]]
    return Rows(federation.input_format().encode_columns(columns, path), torch.tensor(labels, dtype=torch.long))


def read_images(path: Path, federation: Federation) -> Rows:
    """Images sorted by class folder and name, resized to the agreed size."""
    files: list[Path] = []
    labels: list[int] = []
    for name, images in class_images(path):
        files += images
        labels += [class_id(name, federation, path) for _ in images]
    decoded = [read_image(file, federation.shape) for file in files]
    x = torch.stack(decoded) if decoded else torch.zeros(0, *federation.shape, dtype=torch.uint8)
    return Rows(x, torch.tensor(labels, dtype=torch.long))


def read_graph(path: Path, federation: Federation) -> Nodes:
    """One graph. Nodes are numbered in the order of nodes.csv, whatever their ids are."""
    raw = read_graph_folder(path, OwnSettings(label="label"))
    if len(raw.columns) != federation.features:
        raise ValueError(f"nodes.csv has {len(raw.columns)} features where the federation has {federation.features}")
    y = torch.tensor([class_id(label, federation, path) for label in raw.labels], dtype=torch.long)
    assert raw.edges is not None and raw.nodes is not None
    return Nodes(torch.from_numpy(raw.inputs), torch.from_numpy(raw.edges), y, torch.from_numpy(raw.nodes))
