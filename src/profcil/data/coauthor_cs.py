"""Coauthor CS: a graph of authors and their shared papers, with the words of those papers as features.

It is read from the benchmark's npz file. The features are dense, 18,333 x 6,805 float32 (500 MB), and are stored
once for all parts.
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
        raise files.damaged(FACTS, path, f"does not contain the arrays adj_*, attr_* and labels ({error})") from error
    parts = _graphs.stratified_split(labels, seed, FACTS.name)
    names = tuple(f"class {label}" for label in range(FACTS.classes))
    return _graphs.graph_bundle(FACTS, _graphs.row_normalised(x), edges, labels, parts, names)


def assemble(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and edges. Only plain arrays are read: pickled members of the file are ignored."""
    with np.load(path, allow_pickle=False) as arrays:
        values = arrays["attr_data"]
        columns = arrays["attr_indices"]
        row_starts = arrays["attr_indptr"]
        nodes, features = arrays["attr_shape"]
        neighbours = arrays["adj_indices"]
        starts = arrays["adj_indptr"]
        labels = arrays["labels"]
    if not len(labels) == len(starts) - 1 == nodes:
        raise ValueError("labels, features and edges have different numbers of nodes")
    x = densify(values, columns, row_starts, (int(nodes), int(features)))
    sources = np.repeat(np.arange(len(labels)), np.diff(starts))
    edges = _graphs.undirected(np.stack([sources, neighbours]), len(labels))
    return x, labels, edges
