"""Cora from the Planetoid files: Python 2 pickles, read by a restricted unpickler and without scipy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from profcil.data import _graphs, files, unpickle
from profcil.data.bundle import Bundle, Facts, File

RAW = "https://raw.githubusercontent.com/kimiyoung/planetoid/master/data"
SIZES = {
    "x": 22_119,
    "y": 4_054,
    "tx": 148_025,
    "ty": 28_135,
    "allx": 257_305,
    "ally": 47_959,
    "graph": 59_847,
    "test.index": 5_000,
}
FACTS = Facts(
    name="cora",
    title="Cora",
    modality="graph",
    classes=7,
    train=1_626,
    test=540,
    files=tuple(File(f"raw/ind.cora.{end}", size, url=f"{RAW}/ind.cora.{end}") for end, size in SIZES.items()),
    views=("drop", "mask"),
    encoder="gat",
    homepage="https://github.com/kimiyoung/planetoid",
    licence="not stated; public research data, cite Sen et al. (2008) and Yang et al. (2016)",
    get="copy the ind.cora.* files from https://github.com/kimiyoung/planetoid/tree/master/data there",
)
# In the order of the label columns in the files.
NAMES = (
    "Theory",
    "Reinforcement Learning",
    "Genetic Algorithms",
    "Neural Networks",
    "Probabilistic Methods",
    "Case Based",
    "Rule Learning",
)


def load(root: Path, seed: int = 0) -> Bundle:
    """The citation graph with a seeded 60/20/20 split of every class."""
    folder = files.locate(FACTS, root, "raw/ind.cora.graph").parent
    try:
        x, labels, edges = assemble(folder)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise files.damaged(FACTS, folder, f"contains files that do not fit together ({error})") from error
    parts = _graphs.stratified_split(labels, seed, FACTS.name)
    return _graphs.graph_bundle(FACTS, _graphs.row_normalised(x), edges, labels, parts, NAMES)


def assemble(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels and edges. Row i of tx belongs to the node in line i of test.index."""
    allx = read(folder, "allx").dense()
    tx = read(folder, "tx").dense()
    ally = unpickle.array(read(folder, "ally"))
    ty = unpickle.array(read(folder, "ty"))
    order = read_index(folder)
    nodes_after_allx = range(len(allx), len(allx) + len(tx))
    if sorted(order) != list(nodes_after_allx):
        raise ValueError("test.index does not list the nodes after allx")
    x = np.concatenate([allx, tx])
    x[order] = tx
    onehot = np.concatenate([ally, ty])
    onehot[order] = ty
    edges = _graphs.undirected(read_pairs(folder), len(x))
    return x, onehot.argmax(axis=1), edges


def read_pairs(folder: Path) -> np.ndarray:
    """The pairs [2, n] of a node and a neighbour. There cannot be more of them than bytes in the file."""
    neighbours = read(folder, "graph")
    size = existing(folder, "graph").stat().st_size
    if sum(len(others) for others in neighbours.values()) > size:
        raise ValueError("the graph names one list of neighbours again and again")
    pairs = [(node, other) for node, others in neighbours.items() for other in others]
    return unpickle.integers([node for pair in pairs for node in pair]).reshape(-1, 2).T


def read_index(folder: Path) -> np.ndarray:
    """The node ids of the test rows, in file order."""
    path = existing(folder, "test.index")
    return np.array(path.read_text("ascii").split(), dtype=np.int64)


def read(folder: Path, end: str) -> Any:
    """The object pickled in one file of the set."""
    return unpickle.load(existing(folder, end), unpickle.GRAPHS)


def existing(folder: Path, end: str) -> Path:
    """The path of one file of the set. All files are needed."""
    path = folder / f"ind.cora.{end}"
    if not path.exists():
        raise files.damaged(FACTS, path, "is missing")
    return path
