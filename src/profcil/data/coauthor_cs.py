"""Coauthor CS: authors, their shared papers and the words of those papers, from the benchmark's npz file.

The features are kept as they are, dense: 18,333 x 6,805 float32, 500 MB, stored once and shared by all parts.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from profcil.data import _graphs, files
from profcil.data.bundle import Bundle, Facts, File
from profcil.data.unpickle import densify

PATH = "graphs/coauthor_cs.npz"
FACTS = Facts(
    name="coauthor_cs",
    title="Coauthor CS",
    modality="graph",
    classes=15,
    train=11_000,
    test=3_665,
    files=(
        File(PATH, url="https://raw.githubusercontent.com/shchur/gnn-benchmark/master/data/npz/ms_academic_cs.npz"),
    ),
    views=("drop", "mask"),
    encoder="gat",
    homepage="https://github.com/shchur/gnn-benchmark",
    licence="MIT",
    get="copy data/npz/ms_academic_cs.npz of https://github.com/shchur/gnn-benchmark there as coauthor_cs.npz",
)


def load(root: Path, seed: int = 0) -> Bundle:
    """The co-authorship graph with a seeded 60/20/20 split of every class."""
    path = files.locate(FACTS, root, PATH)
    try:
        x, labels, edges = assemble(path)
    except (ValueError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise files.damaged(FACTS, path, f"does not hold the arrays adj_*, attr_* and labels ({error})") from error
    parts = _graphs.split(labels, seed, FACTS.name)
    names = tuple(f"class {label}" for label in range(FACTS.classes))
    return _graphs.bundle(FACTS, _graphs.row_normalised(x), edges, labels, parts, names)


def assemble(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and edges; only plain arrays are read, whatever else the file holds."""
    with np.load(path, allow_pickle=False) as held:
        data, columns, starts, (rows, width) = (
            held[f"attr_{field}"] for field in ("data", "indices", "indptr", "shape")
        )
        indices, indptr, labels = held["adj_indices"], held["adj_indptr"], held["labels"]
    if not len(labels) == len(indptr) - 1 == rows:
        raise ValueError("labels, features and edges speak of different numbers of nodes")
    ends = np.stack([np.repeat(np.arange(len(labels)), np.diff(indptr)), indices])
    x = densify(data, columns, starts, (int(rows), int(width)))
    return x, labels, _graphs.undirected(ends, len(labels))
