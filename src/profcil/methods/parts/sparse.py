"""Tensors of which only the large entries travel: their values and their places, while that is less than all values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def pack(tensors: Mapping[str, Tensor], threshold: float) -> dict[str, Tensor]:
    """The entries beyond the threshold: values and four-byte places in the flattened tensor. Where more than half of
    the entries count, places would cost more than the zeros between them, and all values go without places."""
    packed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        flat = tensor.flatten()
        large = flat.abs() > threshold
        place = large.nonzero().flatten()
        if 2 * len(place) < len(flat):
            packed |= {f"value/{name}": flat[place], f"place/{name}": place.to(torch.int32)}
        else:
            packed[f"value/{name}"] = flat * large
    return packed


def unpack(packed: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors again, zero elsewhere, in the shapes of `like`."""
    return {name: _whole(packed[f"value/{name}"], packed.get(f"place/{name}"), t) for name, t in like.items()}


def _whole(value: Tensor, place: Tensor | None, like: Tensor) -> Tensor:
    if place is None:
        return value.view_as(like)
    return torch.zeros_like(like).flatten().index_copy(0, place.long(), value).view_as(like)
