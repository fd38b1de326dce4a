"""Products with features of which few are not zero, such as the words of a paper; on a CPU only those are multiplied.

They are found once a tensor, and kept as long as it lives and is not written to.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SPARSE = 0.05  # share of entries that are not zero up to which it pays

Bag = tuple[Tensor, Tensor]  # a matrix and its transpose, each by rows without their zeros

known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → its version, and Bag or None where it is full


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ, by whichever way is faster."""
    bag = bag_of(x) if x.device.type == "cpu" and not x.requires_grad else None
    return F.linear(x, weight) if bag is None else Product.apply(weight, *bag)


def bag_of(x: Tensor) -> Bag | None:
    version, bag = known.get(x, (None, None))
    if version != x._version:
        bag = made(x) if int(torch.count_nonzero(x)) <= SPARSE * x.numel() else None
        known[x] = (x._version, bag)
    return bag


def made(x: Tensor) -> Bag:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls this layout new, and may change how it is made
        return x.to_sparse_csr(), x.t().to_sparse_csr()


class Product(torch.autograd.Function):
    """The same with a gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.columns = columns
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.columns @ grads[0].contiguous()).t(), None, None
