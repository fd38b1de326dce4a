"""Sparse tensors: only large entries are sent, as values and indices, if that is smaller than sending all values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def pack(tensors: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """The entries above the threshold: values, and four-byte indices into the flattened tensor. If at least half of the
    entries are above it, all values are sent without indices, which is smaller."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.flatten()
        large = flat.abs() > threshold
        index = large.nonzero().flatten()
        if 2 * len(index) < len(flat):
            packed[f"value/{name}"] = flat[index]
            packed[f"index/{name}"] = index.to(torch.int32)
        else:
            packed[f"value/{name}"] = flat * large
    return packed


def unpack(packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The dense tensors in the shapes of `like`, with zeros elsewhere."""
    tensors = {}
    for name, tensor in like.items():
        index = packed.get(f"index/{name}")
        tensors[name] = _dense(packed[f"value/{name}"], index, tensor)
    return tensors


def _dense(value: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    if index is None:
        return value.view_as(like)
    zeros = torch.zeros_like(like).flatten()
    return zeros.index_copy(0, index.long(), value).view_as(like)
