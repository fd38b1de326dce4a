"""A client's turn as data: a method yields training phases, and the engine decides how to run them.

A turn is a generator. It yields a `Train`, receives a `Trained`, and returns a `Reply`. Clients do not exchange data
within a round, so the engine may run turns one after another, or run the phases that several turns have yielded as one
batched computation. A method is written the same way in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.data.bundle import Examples
from profcil.engine.channel import Reply
from profcil.model.net import TAIL, Weights

Batch = dict[str, Any]  # tensors with a leading batch axis, the phase's constants, and "rng"


class Source(Protocol):
    """The rows that batches are taken from. A source may also have `order(rng)`, a permutation of an epoch's rows;
    otherwise torch.randperm shuffles them."""

    size: int  # rows in an epoch

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        """The rows of one epoch; the first axis of every tensor has the length `size`."""
        ...


@dataclass(frozen=True)
class GradientNoise:
    """Noise on the gradients of a phase (`privacy/gradients.py`)."""

    bound: float  # the gradient of an example is clipped to this length
    multiplier: float  # deviation of the noise on their sum, in units of the bound
    sampling: float  # the chance with which a step takes an example
    secret: int  # from which noise and samples are drawn


@dataclass(frozen=True)
class Train:
    """One training phase: starting weights, trainable blocks, batch source and loss."""

    name: str
    client: int
    weights: Weights
    blocks: tuple[str, ...]
    loss: Callable[[Any, Batch], Tensor]  # (net or tail, batch) → one value per client
    source: Source
    settings: TrainSettings
    epochs: int
    seed: int  # of the generator for shuffles, pseudo-features and views
    proximal: float = 0.0  # λ of λ‖Π(Θ) − Π(Θ^g)‖²
    constants: dict[str, Tensor] = field(default_factory=dict)  # e.g. the mask of allowed classes
    inputs: Callable[[Tensor], tuple[Tensor, ...]] | None = None  # the "index" of a batch → encoder inputs
    noise: GradientNoise | None = None  # on the gradients

    @property
    def on_features(self) -> bool:
        """Whether only adapter and head are trained. Then the base is not needed and clients can be stacked."""
        return set(self.blocks) <= set(TAIL)

    @property
    def length(self) -> int:
        """Steps in an epoch."""
        batch = self.settings.batch or self.source.size
        return -(-self.source.size // batch)


@dataclass(frozen=True)
class Trained:
    """The result of a phase."""

    weights: Weights  # the starting blocks with the trained ones replaced
    loss: float | Tensor  # mean over the last epoch's steps; a tensor if it has not been read back from a GPU
    steps: int
    max_abs: float | Tensor | None = None  # of the trained parameters, NaN if one is NaN; None = not computed


Turn = Generator[Train, Trained, Reply]


class Shuffled:
    """A batch source of examples: each one once an epoch."""

    def __init__(self, index: Tensor, y: Tensor) -> None:
        self.index = index
        self.y = y
        self.size = len(index)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        return {"index": self.index, "y": self.y}


class Features:
    """Precomputed features as a batch source."""

    def __init__(self, features: Tensor, y: Tensor) -> None:
        self.features = features
        self.y = y
        self.size = len(y)

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        return {"u": self.features, "y": self.y}


def batch_rows(source: Source, batch: int, rng: torch.Generator) -> Tensor:
    """A shuffled epoch of a source as [steps, batch] row numbers."""
    make_order = getattr(source, "order", None)
    order = make_order(rng) if make_order else None
    return cut(source.size, batch, rng, order)


def cut(size: int, batch: int, rng: torch.Generator, order: Tensor | None = None) -> Tensor:
    """A shuffled epoch as [steps, batch] row numbers. The last batch is filled up from the beginning, so that every row
    occurs and all batches have the same shape. Batch size 0 means all rows at once."""
    batch = batch or size
    steps = math.ceil(size / batch)
    if order is None:
        order = torch.randperm(size, generator=rng, device=rng.device)
    repeats, rest = divmod(steps * batch, size)
    rows = torch.cat([*[order] * repeats, order[:rest]])
    return rows.view(steps, batch)


def source_of(examples: Examples, index: Tensor) -> Shuffled:
    """The batch source of these examples."""
    return Shuffled(index, examples.y[index])
