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

# By tensor: its version, and its sparse form or None for a dense tensor.
cached: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weightᵀ, by the sparse product where x is sparse."""
    may_be_sparse = x.device.type == "cpu" and not x.requires_grad
    pair = sparse_form(x) if may_be_sparse else None
    if pair is None:
        return F.linear(x, weight)
    return Product.apply(weight, *pair)


def sparse_form(x: Tensor) -> SparsePair | None:
    """The cached sparse form of a tensor; None for a dense one."""
    version, pair = cached.get(x, (None, None))
    if version != x._version:
        nonzero = int(torch.count_nonzero(x))
        pair = new_sparse_form(x) if nonzero <= SPARSE * x.numel() else None
        cached[x] = (x._version, pair)
    return pair


def new_sparse_form(x: Tensor) -> SparsePair:
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
        grad = ctx.columns @ grads[0].contiguous()
        return grad.t(), None, None
