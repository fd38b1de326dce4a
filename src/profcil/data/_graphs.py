"""Shared by the graph datasets: undirected edges, row-normalised features and a seeded split by class."""

from __future__ import annotations

import numpy as np
import torch

from profcil.data.bundle import Bundle, Facts, Nodes
from profcil.randomness import generator

SHARES = (0.6, 0.2)  # training and validation; the rest is the test part


def undirected(edges: np.ndarray, nodes: int) -> np.ndarray:
    """Edges [2, n] in both directions, each once, without self-loops, sorted.

    An edge to a node outside the graph raises a ValueError.
    """
    edges = edges.astype(np.int64, copy=False).reshape(2, -1)
    if edges.size and not 0 <= edges.min() <= edges.max() < nodes:
        raise ValueError(f"an edge names a node outside 0 to {nodes - 1}")
    source, target = edges[:, edges[0] != edges[1]]
    forward = source * nodes + target  # one number per directed edge
    backward = target * nodes + source
    keys = np.unique(np.concatenate([forward, backward]))
    return np.stack([keys // nodes, keys % nodes])


def row_normalised(x: np.ndarray) -> np.ndarray:
    """Divide each row by its sum, in place, as is usual for bags of words. A zero row stays zero."""
    total = x.sum(axis=1, keepdims=True)
    x /= np.where(total == 0, 1, total)
    return x


def stratified_split(labels: np.ndarray, seed: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training, validation and test nodes: 60/20/20 of every class, drawn with one generator per class."""
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        nodes = generator(seed, name, "split", int(label)).permutation(of_class)
        cuts = np.cumsum([round(share * len(nodes)) for share in SHARES])
        for part, drawn in zip(parts, np.split(nodes, cuts), strict=True):
            part.append(drawn)
    train, validation, test = (np.sort(np.concatenate(part)) for part in parts)
    return train, validation, test


def graph_bundle(
    facts: Facts,
    x: np.ndarray,
    edges: np.ndarray,
    labels: np.ndarray,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    names: tuple[str, ...],
) -> Bundle:
    """A Bundle whose three parts share one graph: features and edges are stored once."""
    all_features = torch.from_numpy(x)
    all_edges = torch.from_numpy(edges)
    y = torch.from_numpy(labels.astype(np.int64))
    node_ids = [torch.from_numpy(part.astype(np.int64)) for part in parts]
    train, validation, test = (Nodes(all_features, all_edges, y[ids], ids) for ids in node_ids)
    return Bundle(facts, train, test, validation, names)
