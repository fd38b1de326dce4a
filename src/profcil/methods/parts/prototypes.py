"""Class prototypes: one mean feature a class, reported by clients with counts and kept by the server without them.

The bank only ever grows: a class that nobody reports in a round keeps the prototype it has. Public implementations
rebuild the bank from each round's reporters, and so lose every class that is away for a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.engine.payload import Block
from profcil.memory.bank import Moments, measure, pool


def no_prototypes(like: Tensor) -> Block:
    """An empty bank for features of the length of `like`, on its device."""
    return Block("prototype", {"mean": like.new_zeros(0, len(like))})


def report(z: Tensor, y: Tensor) -> Block:
    """What a client sends: the mean feature and the count of each class it holds."""
    found = measure(z, y, radius=True)
    return Block("prototype", {"mean": found.mean, "count": found.count}, found.labels)


def merge(bank: Block, reports: Sequence[Block], share: float = 1.0) -> Block:
    """The bank after some reports: a reported class moves by `share` towards the count-weighted mean of its reports,
    a new one takes it as it is, and every other class stays to the bit."""
    fresh = pool([_moments(r) for r in reports])
    rows = dict(zip(bank.labels, bank.tensors["mean"], strict=True))
    for label, mean in zip(fresh.labels, fresh.mean, strict=True):
        rows[label] = torch.lerp(rows.get(label, mean), mean, share)
    labels = tuple(sorted(rows))
    return Block("prototype", {"mean": torch.stack([rows[y] for y in labels])}, labels)


def table(bank: Block, classes: int) -> tuple[Tensor, Tensor]:
    """The bank as one row a class id, and which rows are known: what a loss can look labels up in."""
    mean = bank.tensors["mean"]
    rows, known = mean.new_zeros(classes, mean.shape[1]), mean.new_zeros(classes, dtype=torch.bool)
    index = list(bank.labels)
    rows[index], known[index] = mean, True
    return rows, known


def _moments(block: Block) -> Moments:
    mean = block.tensors["mean"]
    return Moments(block.labels, mean, mean[:, :1], block.tensors["count"])  # second moments do not travel here
