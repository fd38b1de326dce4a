"""A site's own data, in the forms people have them in: a table or JSON of texts, a folder of images, a graph as tables.

texts    a CSV with columns text and label, a JSON list of {"text", "label"}, or the same a line (.jsonl)
images   a folder with one folder of images for every class
a graph  a folder with nodes.csv (id, label, then one column a feature) and edges.csv (source, target)
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from profcil.data._graphs import undirected
from profcil.data._tokens import FIRST, UNKNOWN
from profcil.data.bundle import Examples, Nodes, Rows
from profcil.errors import DataError, nearest

if TYPE_CHECKING:
    from profcil.deploy.federation import Federation

TOKEN = re.compile(r"[\u3400-\u9fff]|[^\W\u3400-\u9fff]+")  # a Chinese character, or a word of anything else
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_examples(path: Path, terms: Federation) -> Examples:
    """The labelled data under a path, as the terms of the federation read them."""
    if not path.exists():
        raise DataError(f"{path} is not there; put the data there or change the manifest")
    readers: Mapping[str, Callable[[Path, Federation], Examples]] = {"text": texts, "image": images, "graph": graph}
    try:
        examples = readers[terms.modality](path, terms)
    except (UnicodeDecodeError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise DataError(
            f"{path} cannot be read as {terms.modality} data ({error}); see the page on deployment"
        ) from None
    if not len(examples):
        raise DataError(f"{path} holds no example; put labelled data there")
    return examples


def label_of(name: str, terms: Federation, path: Path) -> int:
    if name not in terms.classes:
        raise DataError(f"{path} has the label '{name}', which the federation does not; {nearest(name, terms.classes)}")
    return terms.classes.index(name)


def texts(path: Path, terms: Federation) -> Rows:
    rows = list(table(path)) if path.suffix == ".csv" else list(records(path))
    tokens = [token_ids(str(row["text"]), terms) for row in rows]
    y = [label_of(str(row["label"]), terms, path) for row in rows]
    return Rows(torch.tensor(tokens, dtype=torch.long).reshape(-1, terms.length), torch.tensor(y, dtype=torch.long))


def table(path: Path) -> Iterable[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        yield from csv.DictReader(file)


def records(path: Path) -> Iterable[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    yield from (
        (json.loads(line) for line in text.splitlines() if line.strip())
        if path.suffix == ".jsonl"
        else json.loads(text)
    )


def token_ids(text: str, terms: Federation) -> list[int]:
    """Ids by hash: the same for everyone, and no list of words has to be told. A text without words is one unknown."""
    ids = [hashed(word, terms.vocabulary) for word in TOKEN.findall(text.lower())[: terms.length]] or [UNKNOWN]
    return ids + [0] * (terms.length - len(ids))


def hashed(word: str, vocabulary: int) -> int:
    value = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")
    return FIRST + value % (vocabulary - FIRST)


def images(path: Path, terms: Federation) -> Rows:
    """Images in order of class folder and name, brought to the federation's size."""
    found = [
        (file, label_of(folder.name, terms, path))
        for folder in sorted(p for p in path.iterdir() if p.is_dir())
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in IMAGES
    ]
    x = [picture(file, terms.shape) for file, _ in found]
    y = torch.tensor([label for _, label in found], dtype=torch.long)
    return Rows(torch.stack(x) if x else torch.zeros(0, *terms.shape, dtype=torch.uint8), y)


def picture(path: Path, shape: tuple[int, ...]) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise DataError("images need the package pillow, which is not installed; `pip install pillow`") from None
    channels, height, width = shape
    try:
        with Image.open(path) as image:
            fit = image.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path} cannot be read as an image ({error}); take it out or mend it") from None
    return torch.from_numpy(np.asarray(fit, dtype=np.uint8).reshape(height, width, channels).transpose(2, 0, 1).copy())


def graph(path: Path, terms: Federation) -> Nodes:
    """One graph; a node's number is its place in nodes.csv, whatever it is called there."""
    rows = list(table(path / "nodes.csv"))
    place = {row["id"]: i for i, row in enumerate(rows)}
    columns = [c for c in (rows[0] if rows else {}) if c not in ("id", "label")]
    if len(columns) != terms.features:
        raise ValueError(f"nodes.csv has {len(columns)} features where the federation has {terms.features}")
    x = np.array([[float(row[c]) for c in columns] for row in rows], dtype=np.float32).reshape(len(rows), -1)
    y = torch.tensor([label_of(row["label"], terms, path) for row in rows], dtype=torch.long)
    ends = [(place[row["source"]], place[row["target"]]) for row in table(path / "edges.csv")]
    edges = undirected(np.array(ends, dtype=np.int64).reshape(-1, 2).T, len(rows))
    return Nodes(torch.from_numpy(x), torch.from_numpy(edges), y, torch.arange(len(rows)))
