"""What a loader returns: a dataset's facts, its examples, and nothing that knows about clients or tasks.

Two kinds of examples exist. `Rows` are independent (images, texts): row i of `x` is example i. `Nodes` are the nodes
of one graph: an example needs its neighbourhood, so a part of a graph is the induced subgraph. Both answer the same
four questions, and nothing outside this file asks which kind it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
# The augmentations that a dataset of each modality may list in `Facts.views`.
AUGMENTATIONS = {"image": ("crop", "flip", "jitter"), "text": ("drop", "mask"), "graph": ("drop", "mask")}


@dataclass(frozen=True)
class File:
    """One official file: where it lies under the dataset's own folder, how to recognise it, where to get it."""

    path: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    url: str | None = None
    archive: bool = False  # unpack after download; the loader reads what is inside
    sha1: str | None = None
    layout: str = ""  # files of one official layout; where a dataset has several, any one of them is enough


@dataclass(frozen=True)
class Facts:
    """A dataset's fact table. Loaders check what they read against it."""

    name: str
    title: str
    modality: str  # image, text or graph
    classes: int
    train: int | None
    test: int | None
    files: tuple[File, ...] = ()
    views: tuple[str, ...] = ()  # which augmentations keep the label: crop, flip, jitter, ...
    encoder: str = ""
    homepage: str = ""
    licence: str = ""
    get: str = ""  # one sentence: how to get it when `data fetch` cannot


@dataclass(frozen=True)
class Rows:
    """Independent examples: images as uint8 [n, channels, height, width], texts as token ids [n, length], 0 padding."""

    x: Tensor
    y: Tensor

    @property
    def chunk(self) -> int:
        """Examples embedded at once: what a cache holds, or what keeps a GPU busy for longer than it takes to ask."""
        return 1024 if self.x.is_cuda else 512

    def __len__(self) -> int:
        return len(self.y)

    def part(self, ids: Tensor) -> Rows:
        """The examples with these ids, in ascending order of id."""
        ids = ids.sort().values.to(self.y.device)
        return Rows(self.x[ids], self.y[ids])

    def local(self, owned: Tensor) -> Rows:
        """What a client that owns these examples computes on: nothing is copied, its rows point at its own."""
        return self

    def rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        """Where examples lie in `local(owned)`."""
        return ids

    def inputs(self, index: Tensor) -> Inputs:
        """What the encoder is given for these examples."""
        return (self.x[index],)

    def to(self, device: str | torch.device) -> Rows:
        return Rows(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Nodes:
    """Examples that are nodes of one graph; `nodes[i]` is the graph node of example i."""

    x: Tensor  # float [graph nodes, features]
    edges: Tensor  # int64 [2, edges], both directions present, no self-loops
    y: Tensor  # int64 [examples]
    nodes: Tensor  # int64 [examples]
    chunk = 1 << 30  # every call encodes the whole graph, so all nodes are embedded at once

    def __len__(self) -> int:
        return len(self.y)

    def part(self, ids: Tensor) -> Nodes:
        """The examples with these ids on the subgraph induced by their nodes: no other node, no edge to one."""
        ids = ids.sort().values.to(self.y.device)
        kept = self.nodes[ids]
        place = torch.full((len(self.x),), -1, dtype=torch.long, device=self.x.device)
        place[kept] = torch.arange(len(kept), device=self.x.device)
        ends = place[self.edges]
        return Nodes(
            self.x[kept], ends[:, (ends >= 0).all(0)], self.y[ids], torch.arange(len(kept), device=self.x.device)
        )

    def local(self, owned: Tensor) -> Nodes:
        """A client's own graph: induced on what it owns over the whole stream, fixed from the start."""
        return self.part(owned)

    def rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        return torch.searchsorted(owned, ids)

    def inputs(self, index: Tensor) -> Inputs:
        """The whole graph and the nodes asked about."""
        return (self.x, self.edges, self.nodes[index])

    def to(self, device: str | torch.device) -> Nodes:
        return Nodes(self.x.to(device), self.edges.to(device), self.y.to(device), self.nodes.to(device))


Examples = Rows | Nodes


@dataclass(frozen=True)
class Bundle:
    """A loaded dataset. Labels are the dataset's own class ids, 0 to classes - 1, from file to table."""

    facts: Facts
    train: Examples
    test: Examples
    validation: Examples | None
    names: tuple[str, ...]  # class names, by class id
    vocabulary: int = 0  # texts: number of token ids, padding included
    mean: tuple[float, ...] = ()  # images: per channel, of the training part scaled to [0, 1]
    std: tuple[float, ...] = ()
    fingerprint: str = field(default="")  # hash of the labels and inputs; part of every cache key

    def to(self, device: str | torch.device) -> Bundle:
        validation = self.validation.to(device) if self.validation is not None else None
        return replace(self, train=self.train.to(device), test=self.test.to(device), validation=validation)
