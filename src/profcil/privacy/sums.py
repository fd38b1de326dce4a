"""Statistics of a client as sums over its examples, each with the most that one example can add to it.

A block of statistics can be protected if its `row_bound` says how long the rows are that were summed. Two forms are
known: class rows with a mean and a count (and mean squares `second`, one for each feature or one in all), and a packed
second-moment matrix `gram`. After noise a block has the same form, with a count that may be negative; products of mean
and count are the noised sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.engine.channel import Block
from profcil.errors import Failure

SHARES = {"gram": 0.2, "count": 0.1}  # of the budget, relative to the sums of classes, on which most depends


@dataclass(frozen=True)
class Sum:
    """A sum over examples, in float64."""

    value: Tensor
    most: float  # the largest Euclidean norm of what one example adds, with each number multiplied by its weight
    weight: Tensor  # of each number
    share: float = 1.0  # of the budget of a reply, relative to the other sums


def sums_of(name: str, block: Block) -> dict[str, Sum]:
    """The sums in a block."""
    tensors = block.tensors
    bound = block.row_bound
    if tensors.keys() == {"bound"}:
        return {}  # a setting, no sum
    if not bound or not ({"mean", "count"} <= tensors.keys() or "gram" in tensors):
        raise Failure(
            f"the block {name} is no sum over examples of bounded length, so noise cannot protect it; "
            "set privacy.unit = none, or choose other settings of the method"
        )
    found = {}
    if "gram" in tensors:
        packed = tensors["gram"].double()
        weights = triangle_weights(packed.numel()).to(packed.device)
        found["gram"] = Sum(packed, bound**2, weights, SHARES["gram"])
    if "count" in tensors:
        count = tensors["count"].double()
        found["count"] = plain_sum(count, 1.0, SHARES["count"])
        found["mean"] = plain_sum(tensors["mean"].double() * count[:, None], bound)
    if "second" in tensors:
        features = tensors["mean"].shape[1]
        width = tensors["second"].shape[1]
        most = bound**2 if width == features else bound**2 / features
        found["second"] = plain_sum(tensors["second"].double() * count[:, None], most)
    return found


def plain_sum(value: Tensor, most: float, share: float = 1.0) -> Sum:
    """A sum in which all numbers have the same weight."""
    return Sum(value, most, value.new_ones(()), share)


def triangle_weights(numbers: int) -> Tensor:
    """1 on the diagonal of a packed triangle and √2 elsewhere: with them the norm of a packed rrᵀ is ‖r‖²."""
    size = int(((8 * numbers + 1) ** 0.5 - 1) / 2)
    lengths = torch.arange(size, 0, -1)
    diagonal = lengths.cumsum(0) - lengths
    weights = torch.full((numbers,), 2**0.5, dtype=torch.float64)
    weights[diagonal] = 1.0
    return weights


def block_of_sums(block: Block, sums: Mapping[str, Tensor], deviations: Mapping[str, float]) -> Block:
    """The block with noised sums in the place of its own, and the variance of the noise: on each number of a matrix
    beside its diagonal, or on each number of the sum of a class."""
    tensors = dict(block.tensors)
    if "gram" in sums:
        tensors["gram"] = sums["gram"].float()
        tensors["noise"] = sums["gram"].new_tensor([deviations["gram"] ** 2 / 2]).float()
    if "count" in sums:
        count = sums["count"].round()
        count = torch.where(count == 0, torch.ones_like(count), count)
        tensors["count"] = count.to(block.tensors["count"].dtype)
        tensors["noise"] = torch.full_like(count, deviations["mean"] ** 2).float()
        for name in ("mean", "second"):
            if name in sums:
                tensors[name] = (sums[name] / count[:, None]).float()
    return replace(block, tensors=tensors)
