"""What a loader returns: a dataset's facts and examples, without clients or tasks.

There are two kinds of examples. `Rows` are independent (images, texts, tables): row i of `x` is example i. `Nodes` are
nodes of one graph: an example needs its neighbourhood, so a part of a graph is an induced subgraph. Both have the same
methods, so that other code need not know which kind it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from profcil.data.input_format import InputFormat

Inputs = tuple[Tensor, ...]
# The augmentations that a dataset of each modality may list in `Facts.views`.
AUGMENTATIONS = {
    "image": ("crop", "flip", "jitter"),
    "text": ("drop", "mask"),
    "graph": ("drop", "mask"),
    "table": ("noise", "mask"),
}


@dataclass(frozen=True)
class File:
    """One official file: its path in the dataset's folder, its size and checksums, and its download address."""

    path: str
    size: int | None = None
    sha256: str | None = None
    md5: str | None = None
    url: str | None = None
    archive: bool = False  # to be unpacked after download; the loader reads its content
    sha1: str | None = None
    layout: str = ""  # the official layout it belongs to; a dataset with several layouts needs only one of them


@dataclass(frozen=True)
class Facts:
    """A dataset's fact table. Loaders check what they read against it."""

    name: str
    title: str
    modality: str  # image, text, graph or table
    classes: int
    train: int | None
    test: int | None
    files: tuple[File, ...] = ()
    views: tuple[str, ...] = ()  # the augmentations that keep the label, of AUGMENTATIONS
    encoder: str = ""
    homepage: str = ""
    licence: str = ""
    get: str = ""  # how to get the files by hand, as the end of a sentence


@dataclass(frozen=True)
class Rows:
    """Independent examples.

    Images are uint8 [n, channels, height, width] (or float32 in [0, 1]); texts are token ids [n, length], 0 is padding;
    rows of a table are float32 [n, columns].
    """

    x: Tensor
    y: Tensor

    @property
    def chunk(self) -> int:
        """The batch size of inference: small enough for a CPU's cache, large enough to keep a GPU busy."""
        return 1024 if self.x.is_cuda else 512

    def __len__(self) -> int:
        return len(self.y)

    def part(self, ids: Tensor) -> Rows:
        """The examples with these ids, in ascending order of id."""
        ids = ids.sort().values.to(self.y.device)
        return Rows(self.x[ids], self.y[ids])

    def local(self, owned: Tensor) -> Rows:
        """The examples that a client with these ids computes on: all of them, nothing is copied."""
        return self

    def rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        """The row numbers of examples in `local(owned)`."""
        return ids

    def inputs(self, index: Tensor) -> Inputs:
        """The encoder's inputs for these examples."""
        return (self.x[index],)

    def to(self, device: str | torch.device) -> Rows:
        return Rows(self.x.to(device), self.y.to(device))


@dataclass(frozen=True)
class Nodes:
    """Examples that are nodes of one graph; `nodes[i]` is the node of example i."""

    x: Tensor  # float [graph nodes, features]
    edges: Tensor  # int64 [2, edges], both directions present, no self-loops
    y: Tensor  # int64 [examples]
    nodes: Tensor  # int64 [examples]
    chunk = 1 << 30  # the encoder processes the whole graph in any case, so all nodes are one batch

    def __len__(self) -> int:
        return len(self.y)

    def part(self, ids: Tensor) -> Nodes:
        """The examples with these ids, on the subgraph induced by their nodes."""
        ids = ids.sort().values.to(self.y.device)
        kept = self.nodes[ids]
        new_ids = torch.arange(len(kept), device=self.x.device)
        new_id_of = torch.full((len(self.x),), -1, dtype=torch.long, device=self.x.device)
        new_id_of[kept] = new_ids
        edges = new_id_of[self.edges]
        inside = (edges >= 0).all(0)
        return Nodes(self.x[kept], edges[:, inside], self.y[ids], new_ids)

    def local(self, owned: Tensor) -> Nodes:
        """A client's graph at every position: the subgraph induced by all nodes that it owns over the whole stream."""
        return self.part(owned)

    def rows(self, ids: Tensor, owned: Tensor) -> Tensor:
        """The row numbers of examples in `local(owned)`; `owned` is ascending."""
        return torch.searchsorted(owned, ids)

    def inputs(self, index: Tensor) -> Inputs:
        """The encoder's inputs: the whole graph, and the nodes of these examples."""
        return (self.x, self.edges, self.nodes[index])

    def to(self, device: str | torch.device) -> Nodes:
        x = self.x.to(device)
        edges = self.edges.to(device)
        y = self.y.to(device)
        nodes = self.nodes.to(device)
        return Nodes(x, edges, y, nodes)


Examples = Rows | Nodes


@dataclass(frozen=True)
class Bundle:
    """A loaded dataset. Labels are the dataset's class ids, 0 to classes - 1; they are never renumbered."""

    facts: Facts
    train: Examples
    test: Examples
    validation: Examples | None
    names: tuple[str, ...]  # class names, by class id
    vocabulary: int = 0  # texts: the number of token ids, including padding
    mean: tuple[float, ...] = ()  # images: per channel, over the training part scaled to [0, 1]; tables: per column
    std: tuple[float, ...] = ()
    fingerprint: str = field(default="")  # hash of the labels and inputs; part of every cache key
    tasks: tuple[tuple[int, ...], ...] = ()  # class ids of each task, in order; empty = drawn with the seed
    input_format: InputFormat | None = None  # None = raw inputs other than images of this size cannot be read

    def to(self, device: str | torch.device) -> Bundle:
        validation = self.validation.to(device) if self.validation is not None else None
        return replace(self, train=self.train.to(device), test=self.test.to(device), validation=validation)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, copied asynchronously through pinned memory.

    A copy from pageable memory would first synchronise the GPU.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and tensor.numel():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
