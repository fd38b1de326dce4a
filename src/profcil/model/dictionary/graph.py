"""A dictionary of graphs: the most frequent words of the nodes.

The clients count their nodes with each word. The server adds the counts. The most frequent words become entries. A node
is represented by its own entries and by their means over the nodes within one and within two steps, side by side. Its
own entries and each of the means have unit length, so that the scale does not depend on the number of neighbours:
clients own few of the edges that exist at prediction.

An entry reveals that a word is frequent among all clients: at least `min_support` nodes have it. The counts of one
client reveal which words its nodes have. A deployment should add secure summation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.data.bundle import Inputs
from profcil.model.dictionary.text import most_frequent

RADII = 3  # a node itself, one step and two steps, as in a graph network of two layers
COLUMNS = 512  # words that are averaged at a time


class GraphDictionary:
    """The most frequent words at each radius. The columns that are left are zero."""

    rounds = 1
    usable_untrained = False

    def __init__(self, width: int, min_support: int = 1) -> None:
        self.width = width
        self.words = width // RADII
        self.min_support = max(min_support, 1)

    def begin(self, rng: torch.Generator) -> dict[str, Tensor]:
        """No entries. Nothing is drawn."""
        no_words = torch.full((self.words,), -1, dtype=torch.long)
        return {"words": no_words}

    def sums(self, entries: dict[str, Tensor], inputs: Inputs, round: int) -> dict[str, Tensor]:
        """The number of the examples' nodes that have each word."""
        x, _, nodes = inputs
        has_word = x[nodes] != 0
        return {"nodes": has_word.sum(0).int()}

    def update(self, entries: dict[str, Tensor], sums: dict[str, Tensor], round: int) -> dict[str, Tensor]:
        """The most frequent words with support."""
        frequent = most_frequent(sums["nodes"], self.words, self.min_support)
        return {"words": frequent}

    def features(self, entries: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """The entries of each node at each radius, [nodes, width]."""
        x, edges, nodes = inputs
        words = entries["words"]
        if not torch.compiler.is_exporting():  # an exported model has the known ones alone
            words = words[words >= 0]
        norm = x[:, words].norm(dim=1, keepdim=True).clamp(min=1e-6)
        parts = [radii(x[:, part] / norm, edges, nodes) for part in words.split(COLUMNS)]
        by_radius = F.normalize(torch.cat(parts, 2), dim=2)
        found = by_radius.transpose(0, 1).flatten(1)
        missing = self.width - found.shape[1]
        return F.pad(found, (0, missing))


def neighbours_of(target: Tensor, x: Tensor) -> Tensor:
    """The number of edges that end at each node."""
    if torch.compiler.is_exporting():  # ONNX cannot count
        return torch.zeros_like(x[:, 0], dtype=torch.long).index_add(0, target, torch.ones_like(target))
    return torch.bincount(target, minlength=len(x))


def radii(x: Tensor, edges: Tensor, nodes: Tensor) -> Tensor:
    """Features of some nodes and their means over growing neighbourhoods, [RADII, nodes, features]."""
    source, target = edges
    degree = neighbours_of(target, x)[:, None] + 1
    found = [x[nodes]]
    for _ in range(RADII - 1):
        total = x.index_add(0, target, x[source])
        x = total / degree
        found.append(x[nodes])
    return torch.stack(found)
