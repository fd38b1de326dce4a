"""The layout of a client's tensors in one row of a matrix.

With it, all parameters of a network are one tensor, and so are its gradients and its moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

import torch
from torch import Tensor

from profcil.engine.optim import is_channels_last
from profcil.model.net import MODEL, Net, Weights

At = tuple[str, str]  # block and tensor
ALIGNED = 8  # rows start at multiples of so many numbers: 16 bytes in bfloat16


class Layout:
    """Named tensors one after another in a row of a matrix, each in its own memory format."""

    def __init__(self, tensors: Mapping[At, Tensor]) -> None:
        self.places = {at: (t.shape, t.numel(), is_channels_last(t)) for at, t in tensors.items()}
        self.size = sum(size for _, size, _ in self.places.values())

    def matrix(self, like: Tensor) -> Tensor:
        """Zeros with one row for each element of `like`, of its type and on its device."""
        # The kernels of convolutions need aligned filters. For others, cuDNN may choose a kernel that is not
        # deterministic.
        stride = -(-self.size // ALIGNED) * ALIGNED
        return like.new_zeros(len(like), stride)[:, : self.size]

    def views(self, row: Tensor, low: Tensor | None = None) -> dict[At, Tensor]:
        """The tensors as views of a row. With a second row `low`, the convolution filters are views of that one."""
        pieces = row.split([size for _, size, _ in self.places.values()])
        tensors: dict[At, Tensor] = {}
        for (at, (shape, _, last)), piece in zip(self.places.items(), pieces, strict=True):
            tensors[at] = _unflattened(piece, shape, last)
        if low is None:
            return tensors
        return tensors | {at: v for at, v in self.views(low).items() if v.dim() == 4}

    def filters(self) -> slice:
        """The columns of the convolution filters, which must be contiguous (see `sorted_for_row`)."""
        sizes = [(len(shape) == 4, size) for shape, size, _ in self.places.values()]
        start = sum(size for _, size in takewhile(lambda piece: not piece[0], sizes))
        return slice(start, start + sum(size for filters, size in sizes if filters))

    def flat(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Tensors flattened in the order of a row; a copy only where the memory format differs."""
        lasts = [last for _, _, last in self.places.values()]
        return [_in_memory_order(t, last).reshape(-1) for t, last in zip(tensors, lasts, strict=True)]

    def load(self, row: Tensor, weights: Weights) -> None:
        """Copies weights into a row."""
        if self.places:
            torch.cat(self.flat(weights[b][k] for b, k in self.places), out=row)


def _unflattened(piece: Tensor, shape: torch.Size, last: bool) -> Tensor:
    if not last:
        return piece.view(shape)
    n, c, h, w = shape
    return piece.view(n, h, w, c).permute(0, 3, 1, 2)


def _in_memory_order(tensor: Tensor, last: bool) -> Tensor:
    return tensor.permute(0, 2, 3, 1) if last else tensor


def parameters_of(net: Net, blocks: Iterable[str]) -> dict[At, Tensor]:
    return {(b, k): p for b in blocks for k, p in getattr(net, b).named_parameters()}


def sorted_for_row(tensors: Mapping[At, Tensor]) -> dict[At, Tensor]:
    """Sorts the blocks with a proximal term first, and all convolution filters next to each other."""

    def place(at: At) -> tuple[bool, bool]:
        free = at[0] not in MODEL
        return free, (tensors[at].dim() == 4) != free

    return {at: tensors[at] for at in sorted(tensors, key=place)}


def buffers_of(net: Net, blocks: Iterable[str]) -> dict[At, Tensor]:
    """The buffers of the blocks, such as running statistics."""
    known = parameters_of(net, blocks)
    state = {(b, k): v for b in blocks for k, v in getattr(net, b).state_dict().items()}
    return {at: v for at, v in state.items() if at not in known}
