"""A graph: nodes.csv and edges.csv, or an npz file of the graph benchmarks."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from profcil.config import OwnSettings
from profcil.data._graphs import undirected
from profcil.data._numbers import number_columns
from profcil.data.own.columns import label_column, parts_of, split_column
from profcil.data.own.raw import Raw
from profcil.data.own.records import Records, read_csv
from profcil.errors import DataError


def read_graph_folder(folder: Path, settings: OwnSettings) -> Raw:
    """One graph. A node without a label is part of the graph, but no example."""
    path = folder / "nodes.csv"
    nodes = read_nodes(folder, settings)
    label = label_column(nodes, settings)
    left_out = {"id", label, split_column(nodes), *settings.ignore}
    names = [name for name in nodes.columns if name not in left_out]
    if not names:
        raise DataError(f"{path} has no features; add columns of numbers beside id and {label}")
    x = number_columns(nodes.columns, names, path).astype(np.float32)
    edges = read_edges(folder / "edges.csv", nodes.columns["id"], settings.encoding)
    values = [str(value).strip() for value in nodes.columns[label]]
    labelled = np.array([i for i, value in enumerate(values) if value], dtype=np.int64)
    labels = [values[i] for i in labelled]
    parts = parts_of(nodes, "")
    drawn = [parts[i] for i in labelled] if parts else []
    return Raw("graph", x, labels, drawn, columns=tuple(names), edges=edges, nodes=labelled)


def read_nodes(folder: Path, settings: OwnSettings) -> Records:
    """The rows of nodes.csv, each with an id."""
    path = folder / "nodes.csv"
    nodes = Records(path, read_csv(path, settings.encoding), {})
    if "id" not in nodes.columns:
        raise DataError(f"{path} has no column id; name each node there, as edges.csv names it")
    return nodes


def read_edges(path: Path, ids: Sequence[str], encoding: str = "utf-8") -> np.ndarray:
    """Undirected edges between nodes, which are numbered in the order of nodes.csv."""
    numbers = {node: i for i, node in enumerate(ids)}
    if len(numbers) < len(ids):
        twice = next(node for i, node in enumerate(ids) if numbers[node] != i)
        raise DataError(f"{path.parent / 'nodes.csv'} has the node '{twice}' twice; remove one of the two")
    columns = read_csv(path, encoding)
    for name in ("source", "target"):
        if name not in columns:
            raise DataError(f"{path} has no column {name}; it needs the columns source and target")
        for row, node in enumerate(columns[name]):
            if node not in numbers:
                raise DataError(
                    f"{path} names the node '{node}' in row {row + 1}, which is not in nodes.csv; add the node or "
                    "remove the edge"
                )
    sources = [numbers[node] for node in columns["source"]]
    targets = [numbers[node] for node in columns["target"]]
    ends = np.array([sources, targets], dtype=np.int64)
    return undirected(ends.reshape(2, -1), len(ids))


def read_graph_npz(path: Path) -> Raw:
    """The arrays adj_*, attr_* and labels of the graph benchmarks."""
    from profcil.data.coauthor_cs import assemble

    try:
        x, labels, edges = assemble(path)
    except (ValueError, KeyError, IndexError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{path} does not contain a graph as adj_*, attr_* and labels ({error}); write these arrays"
        ) from None
    return Raw("graph", x, [str(label) for label in labels], [], edges=edges, nodes=np.arange(len(labels)))
