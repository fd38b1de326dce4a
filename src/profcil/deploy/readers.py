"""Reads a site's own data in common formats: texts in CSV or JSON, images in folders, a graph in CSV tables.

texts    a CSV with the columns text and label, a JSON list of {"text", "label"}, or one such object per line (.jsonl)
images   a folder with one folder of images per class
a graph  a folder with nodes.csv (id, label, then one column per feature) and edges.csv (source, target)
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from profcil.data._graphs import undirected
from profcil.data.bundle import Examples, Nodes, Rows
from profcil.data.input_format import read_image
from profcil.errors import DataError, nearest

if TYPE_CHECKING:
    from profcil.deploy.federation import Federation

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_examples(path: Path, federation: Federation) -> Examples:
    """The labelled data at a path, in the form that the federation agreed on."""
    if not path.exists():
        raise DataError(f"{path} does not exist; put the data there or change the manifest")
    readers: Mapping[str, Callable[[Path, Federation], Examples]] = {
        "text": read_texts,
        "image": read_images,
        "graph": read_graph,
    }
    try:
        examples = readers[federation.modality](path, federation)
    except (UnicodeDecodeError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read as {federation.modality} data ({error}); docs/deployment.md describes the format"
        ) from None
    if not len(examples):
        raise DataError(f"{path} has no examples; put labelled data there")
    return examples


def class_id(name: str, federation: Federation, path: Path) -> int:
    if name not in federation.classes:
        raise DataError(
            f"{path} has the label '{name}', which is not a class of the federation; "
            f"{nearest(name, federation.classes)}"
        )
    return federation.classes.index(name)


def read_texts(path: Path, federation: Federation) -> Rows:
    rows = list(read_csv(path)) if path.suffix == ".csv" else list(read_json(path))
    x = federation.input_format().encode_texts([str(row["text"]) for row in rows])
    labels = [class_id(str(row["label"]), federation, path) for row in rows]
    return Rows(x, torch.tensor(labels, dtype=torch.long))


def read_csv(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def read_json(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, or of a file with one object per line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
    else:
        yield from json.loads(text)


def read_images(path: Path, federation: Federation) -> Rows:
    """Images sorted by class folder and name, resized to the agreed size."""
    files: list[Path] = []
    labels: list[int] = []
    for folder in sorted(p for p in path.iterdir() if p.is_dir()):
        for file in sorted(folder.iterdir()):
            if file.suffix.lower() in IMAGE_SUFFIXES:
                files.append(file)
                labels.append(class_id(folder.name, federation, path))
    images = [read_image(file, federation.shape) for file in files]
    x = torch.stack(images) if images else torch.zeros(0, *federation.shape, dtype=torch.uint8)
    return Rows(x, torch.tensor(labels, dtype=torch.long))


def read_graph(path: Path, federation: Federation) -> Nodes:
    """One graph. Nodes are numbered in the order of nodes.csv, whatever their ids are."""
    rows = list(read_csv(path / "nodes.csv"))
    numbers = {row["id"]: i for i, row in enumerate(rows)}
    columns = [c for c in (rows[0] if rows else {}) if c not in ("id", "label")]
    if len(columns) != federation.features:
        raise ValueError(f"nodes.csv has {len(columns)} features where the federation has {federation.features}")
    features = [[float(row[c]) for c in columns] for row in rows]
    x = np.array(features, dtype=np.float32).reshape(len(rows), -1)
    y = torch.tensor([class_id(row["label"], federation, path) for row in rows], dtype=torch.long)
    ends = [(numbers[row["source"]], numbers[row["target"]]) for row in read_csv(path / "edges.csv")]
    edges = undirected(np.array(ends, dtype=np.int64).reshape(-1, 2).T, len(rows))
    return Nodes(torch.from_numpy(x), torch.from_numpy(edges), y, torch.arange(len(rows)))
