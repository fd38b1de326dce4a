"""The layout of a client's tensors in one row of a matrix.

With it, all parameters of a network are one tensor, and so are its gradients and its moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from profcil.engine.steps import is_channels_last
from profcil.model.net import MODEL, Net, Weights

TensorName = tuple[str, str]  # block and tensor
ALIGNED = 8  # rows start at multiples of so many numbers: 16 bytes in bfloat16


class Place(NamedTuple):
    """A tensor in a row."""

    shape: torch.Size
    size: int
    channels_last: bool


class FlatLayout:
    """Named tensors one after another in a row of a matrix, each in its own memory format."""

    def __init__(self, tensors: Mapping[TensorName, Tensor]) -> None:
        self.places = {name: Place(t.shape, t.numel(), is_channels_last(t)) for name, t in tensors.items()}
        self.sizes = [place.size for place in self.places.values()]
        self.size = sum(self.sizes)

    def matrix(self, like: Tensor) -> Tensor:
        """Zeros with one row for each element of `like`, of its type and on its device."""
        # The kernels of convolutions need aligned filters. For others, cuDNN may choose a kernel that is not
        # deterministic.
        stride = -(-self.size // ALIGNED) * ALIGNED
        return like.new_zeros(len(like), stride)[:, : self.size]

    def views(self, row: Tensor, low: Tensor | None = None) -> dict[TensorName, Tensor]:
        """The tensors as views of a row. With a second row `low`, the convolution filters are views of that one."""
        tensors: dict[TensorName, Tensor] = {}
        pieces = row.split(self.sizes)
        for (name, place), piece in zip(self.places.items(), pieces, strict=True):
            tensors[name] = _unflattened(piece, place)
        if low is not None:
            for name, tensor in self.views(low).items():
                if tensor.dim() == 4:
                    tensors[name] = tensor
        return tensors

    def filters(self) -> slice:
        """The columns of the convolution filters, which must be contiguous (see `sorted_for_row`)."""
        start = 0
        size = 0
        for place in self.places.values():
            if len(place.shape) == 4:
                size += place.size
            elif size == 0:
                start += place.size
        return slice(start, start + size)

    def flat(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors flattened in the order of a row; a copy only where the memory format differs."""
        flattened = []
        for tensor, place in zip(tensors, self.places.values(), strict=True):
            in_memory_order = tensor.permute(0, 2, 3, 1) if place.channels_last else tensor
            flattened.append(in_memory_order.reshape(-1))
        return flattened

    def load(self, row: Tensor, weights: Weights) -> None:
        """Copies weights into a row."""
        if self.places:
            tensors = [weights[b][k] for b, k in self.places]
            torch.cat(self.flat(tensors), out=row)


def _unflattened(piece: Tensor, place: Place) -> Tensor:
    if not place.channels_last:
        return piece.view(place.shape)
    n, c, h, w = place.shape
    return piece.view(n, h, w, c).permute(0, 3, 1, 2)


def parameters_of(net: Net, blocks: Iterable[str]) -> dict[TensorName, Tensor]:
    return {(b, k): p for b in blocks for k, p in getattr(net, b).named_parameters()}


def sorted_for_row(tensors: Mapping[TensorName, Tensor]) -> dict[TensorName, Tensor]:
    """Sorts the blocks with a proximal term first, and all convolution filters next to each other."""

    def place(name: TensorName) -> tuple[bool, bool]:
        block, _ = name
        free = block not in MODEL
        is_filter = tensors[name].dim() == 4
        return free, is_filter != free

    return {name: tensors[name] for name in sorted(tensors, key=place)}


def buffers_of(net: Net, blocks: Iterable[str]) -> dict[TensorName, Tensor]:
    """The buffers of the blocks, such as running statistics."""
    parameters = parameters_of(net, blocks)
    state = {(b, k): v for b in blocks for k, v in getattr(net, b).state_dict().items()}
    return {name: v for name, v in state.items() if name not in parameters}
