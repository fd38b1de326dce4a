"""What the graph datasets share: undirected edges, row-normalised features and a seeded split by class."""

from __future__ import annotations

import numpy as np
import torch

from profcil.data.bundle import Bundle, Facts, Nodes
from profcil.randomness import generator

SHARES = (0.6, 0.2)  # training and validation; the rest is the test part


def undirected(ends: np.ndarray, nodes: int) -> np.ndarray:
    """Edges [2, n] in both directions, each once, no self-loops, sorted; an end outside the graph is a ValueError."""
    ends = ends.astype(np.int64, copy=False).reshape(2, -1)
    if ends.size and not 0 <= ends.min() <= ends.max() < nodes:
        raise ValueError(f"an edge names a node outside 0 to {nodes - 1}")
    source, target = ends[:, ends[0] != ends[1]]
    keys = np.unique(np.concatenate([source * nodes + target, target * nodes + source]))
    return np.stack([keys // nodes, keys % nodes])


def row_normalised(x: np.ndarray) -> np.ndarray:
    """Each row divided by its sum, in place, as is usual for bags of words; an empty row stays zero."""
    total = x.sum(axis=1, keepdims=True)
    x /= np.where(total == 0, 1, total)
    return x


def split(labels: np.ndarray, seed: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Training, validation and test nodes: 60/20/20 of every class, drawn at an address of its own."""
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for label in np.unique(labels):
        nodes = generator(seed, name, "split", int(label)).permutation(np.flatnonzero(labels == label))
        cuts = np.cumsum([round(share * len(nodes)) for share in SHARES])
        for part, drawn in zip(parts, np.split(nodes, cuts), strict=True):
            part.append(drawn)
    train, validation, test = (np.sort(np.concatenate(part)) for part in parts)
    return train, validation, test


def bundle(
    facts: Facts,
    x: np.ndarray,
    edges: np.ndarray,
    labels: np.ndarray,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    names: tuple[str, ...],
) -> Bundle:
    """A Bundle whose three parts share one graph: features and edges are stored once."""
    features, ends = torch.from_numpy(x), torch.from_numpy(edges)
    y = torch.from_numpy(labels.astype(np.int64))
    ids = [torch.from_numpy(part.astype(np.int64)) for part in parts]
    train, validation, test = (Nodes(features, ends, y[part], part) for part in ids)
    return Bundle(facts, train, test, validation, names)
