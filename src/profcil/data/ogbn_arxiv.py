"""ogbn-arxiv from its official raw files, parsed once; papers up to 2017 train, 2018 validates, 2019 on tests."""

from __future__ import annotations

import csv
import gzip
import zlib
from pathlib import Path

import numpy as np

from profcil.data import _graphs, files
from profcil.data.bundle import Bundle, Facts, File

FOLDER = "arxiv"
RAW = ("node-feat", "edge", "node-label", "num-node-list", "num-edge-list")
PARTS = ("train", "valid", "test")
PATHS = tuple(f"raw/{name}.csv.gz" for name in RAW) + tuple(f"split/time/{part}.csv.gz" for part in PARTS)
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
    """The citation graph, made undirected, with the official time split, so no draw is made."""
    sources = [files.locate(FACTS, root, f"{FOLDER}/{path}") for path in PATHS]
    arrays = files.cached(sources[0].parent.parent, f"graph-{files.stat_stamp(sources)}", lambda: parse(sources))
    parts = (arrays["train"], arrays["valid"], arrays["test"])
    return _graphs.bundle(FACTS, arrays["x"], arrays["edges"], arrays["y"], parts, class_names(root))


def parse(sources: list[Path]) -> files.Arrays:
    """All arrays of the dataset, checked against each other."""
    feat, edge, label, nodes, edges, *split = sources
    x, ends = table(feat, np.float32), table(edge, np.int64)
    y, total = table(label, np.int64).reshape(-1), len(x)
    promised = int(table(nodes, np.int64).sum()), int(table(edges, np.int64).sum())
    if (total, len(ends)) != promised or len(y) != total:
        raise files.damaged(
            FACTS, feat.parent, f"has {total} nodes, {len(y)} labels, {len(ends)} edges where its lists say {promised}"
        )
    parts = {part: table(path, np.int64).reshape(-1) for part, path in zip(PARTS, split, strict=True)}
    if any(part.size and not 0 <= part.min() <= part.max() < total for part in parts.values()):
        raise files.damaged(FACTS, split[0].parent, f"names a node outside 0 to {total - 1}")
    try:
        return {"x": x, "y": y, "edges": _graphs.undirected(ends.T, total), **parts}
    except ValueError as error:
        raise files.damaged(FACTS, edge, f"does not fit the other files ({error})") from error


def table(path: Path, dtype: type) -> np.ndarray:
    """A gzipped table of numbers without a header, as [rows, columns]."""
    try:
        return np.loadtxt(path, dtype=dtype, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise files.damaged(FACTS, path, f"is not a gzipped table of numbers ({error})") from error


def class_names(root: Path) -> tuple[str, ...]:
    """arXiv subject areas, if the official mapping is there."""
    path = files.seek(FACTS, root, f"{FOLDER}/mapping/labelidx2arxivcategeory.csv.gz")
    if path is None:
        return tuple(f"class {label}" for label in range(FACTS.classes))
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return tuple(row[1] for row in list(csv.reader(stream))[1:])
