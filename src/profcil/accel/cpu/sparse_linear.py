"""Products with sparse features, such as bags of words. On a CPU only the nonzero entries are multiplied.

The sparse form of a tensor is cached as long as the tensor exists and is not modified.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SPARSE = 0.05  # largest share of nonzero entries for which the sparse product is faster

SparsePair = tuple[Tensor, Tensor]  # a matrix and its transpose, each in CSR format

known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor → (version, Bag, or None for a dense tensor)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ, by the sparse product where x is sparse."""
    bag = sparse_form(x) if x.device.type == "cpu" and not x.requires_grad else None
    return F.linear(x, weight) if bag is None else Product.apply(weight, *bag)


def sparse_form(x: Tensor) -> SparsePair | None:
    """The cached sparse form of a tensor; None for a dense one."""
    version, bag = known.get(x, (None, None))
    if version != x._version:
        bag = made(x) if int(torch.count_nonzero(x)) <= SPARSE * x.numel() else None
        known[x] = (x._version, bag)
    return bag


def made(x: Tensor) -> SparsePair:
    """The sparse form of a matrix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that sparse CSR is in beta
        return x.to_sparse_csr(), x.t().to_sparse_csr()


class Product(torch.autograd.Function):
    """The sparse product, with a gradient for the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.columns = columns
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return (ctx.columns @ grads[0].contiguous()).t(), None, None
