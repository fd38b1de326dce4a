"""ogbn-arxiv from its official raw files, parsed once and cached.

The official split is by year: training up to 2017, validation in 2018, test from 2019 on.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path

import numpy as np

from profcil.data import _graphs, files
from profcil.data.bundle import Bundle, Facts, File
from profcil.errors import DataError

FOLDER = "arxiv"
RAW = ("node-feat", "edge", "node-label", "num-node-list", "num-edge-list")
PARTS = ("train", "valid", "test")
PATHS = tuple(f"raw/{name}.csv.gz" for name in RAW) + tuple(f"split/time/{part}.csv.gz" for part in PARTS)
MARK = "FEATURES-ARE-NOT-OGB.txt"  # beside raw/: the features are others than the official ones
FACTS = Facts(
    name="ogbn_arxiv",
    title="ogbn-arxiv",
    modality="graph",
    classes=40,
    train=90_941,
    test=48_603,
    files=(
        File(
            f"{FOLDER}.zip",
            sha256="49f85c801589ecdcc52cfaca99693aaea7b8af16a9ac3f41dd85a5f3193fe276",
            url="https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip",
            archive=True,
        ),
        *(File(f"{FOLDER}/{path}") for path in PATHS),
    ),
    views=("drop", "mask"),
    encoder="gat",
    homepage="https://ogb.stanford.edu/docs/nodeprop/#ogbn-arxiv",
    licence="ODC-BY",
    get="unpack arxiv.zip from https://ogb.stanford.edu there",
)


def load(root: Path, seed: int = 0) -> Bundle:
    """The citation graph, made undirected. The split is the official one, so `seed` is not used."""
    sources = [files.locate(FACTS, root, f"{FOLDER}/{path}") for path in PATHS]
    folder = sources[0].parent.parent
    if (folder / MARK).exists():
        raise DataError(
            f"{folder} has features that are not ogbn-arxiv's, as {MARK} in it says; use --dataset ogbn_arxiv_standin, "
            f"or {FACTS.get}"
        )
    return read(FACTS, sources)


def read(facts: Facts, sources: list[Path]) -> Bundle:
    """The graph in files of the official form."""
    folder = sources[0].parent.parent
    name = f"graph-{files.stat_hash(sources)}"
    arrays = files.cached(folder, name, lambda: parse(sources))
    parts = (arrays["train"], arrays["valid"], arrays["test"])
    names = class_names(folder)
    return _graphs.graph_bundle(facts, arrays["x"], arrays["edges"], arrays["y"], parts, names)


def parse(sources: list[Path]) -> files.Arrays:
    """All arrays of the dataset, checked against each other."""
    feature_path, edge_path, label_path, node_count_path, edge_count_path, *split_paths = sources
    x = table(feature_path, np.float32)
    pairs = table(edge_path, np.int64)
    y = table(label_path, np.int64).reshape(-1)
    nodes = int(table(node_count_path, np.int64).sum())
    edges = int(table(edge_count_path, np.int64).sum())
    fit_together = len(x) == len(y) == nodes and len(pairs) == edges
    if not fit_together:
        given = f"has {len(x)} nodes, {len(y)} labels and {len(pairs)} edges"
        raise files.damaged(FACTS, feature_path.parent, f"{given} where its count files say {nodes} and {edges}")
    parts = read_split(split_paths, nodes)
    try:
        return {"x": x, "y": y, "edges": _graphs.undirected(pairs.T, nodes), **parts}
    except ValueError as error:
        raise files.damaged(FACTS, edge_path, f"does not fit the other files ({error})") from error


def read_split(paths: list[Path], nodes: int) -> files.Arrays:
    """The node ids of each part."""
    parts = {}
    for part, path in zip(PARTS, paths, strict=True):
        parts[part] = table(path, np.int64).reshape(-1)
    for ids in parts.values():
        if ids.size and not 0 <= ids.min() <= ids.max() < nodes:
            raise files.damaged(FACTS, paths[0].parent, f"names a node outside 0 to {nodes - 1}")
    return parts


def table(path: Path, dtype: type) -> np.ndarray:
    """A gzipped table of numbers without a header, as [rows, columns]."""
    try:
        return np.loadtxt(path, dtype=dtype, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise files.damaged(FACTS, path, f"is not a gzipped table of numbers ({error})") from error


def class_names(folder: Path) -> tuple[str, ...]:
    """The arXiv subject areas, or "class N" if the official mapping is missing."""
    path = folder / "mapping" / "labelidx2arxivcategeory.csv.gz"
    if not path.exists():
        return tuple(f"class {label}" for label in range(FACTS.classes))
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            _, *rows = csv.reader(stream)
            return tuple(row[1] for row in rows)
    except (ValueError, LookupError, OSError, EOFError, zlib.error, csv.Error) as error:
        raise files.damaged(FACTS, path, f"does not list the classes ({error})") from error
