"""An epoch of steps on adapter and head in C, with the gradients and updates of `adapter_head_epoch`.

It takes three quarters of the time. Torch's matrix products are made for larger matrices, and every small operation
reads again from memory what the one before has written.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profcil.accel.loader import c_library
from profcil.engine.optim import BETA1, BETA2, EPSILON, Rule

if TYPE_CHECKING:
    from profcil.accel.cpu.adapter_head_epoch import TrainingState

KINDS = "sgd", "adam", "adamw"
ALIGNMENT = 64  # bytes of a line in the cache


def library() -> ctypes.CDLL | None:
    """The compiled library; None where it cannot be compiled."""
    compiled = c_library("cpu/adapter_head.c")
    if compiled is not None:
        compiled.room.restype = ctypes.c_int64
    return compiled


SIZES = ("features", "narrow", "classes", "barred", "batch")
OFFSETS = ("down", "down_bias", "up", "up_bias", "scale", "shift", "head")
INTEGERS = (*SIZES, *OFFSETS, "parameters", "kind", "time")
NUMBERS = ("lr", "decay", "momentum", "beta1", "beta2", "epsilon", "proximal", "clip")


class Plan(ctypes.Structure):
    """Sizes, the offset of each tensor in the vector, and the optimiser: `Plan` in adapter_head.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in NUMBERS),
    )


class CompiledEpochs:
    """The epochs of one phase. Vectors are updated in place; the caller must keep references to them."""

    def __init__(
        self, library: ctypes.CDLL, state: TrainingState, rule: Rule, batch: int, proximal: float, clip: float
    ) -> None:
        vector = state.vector[0]
        head = state.weights["head"]
        narrow, features = state.weights["down"].shape
        offsets = {}
        for name, tensor in state.weights.items():
            in_bytes = tensor.data_ptr() - vector.data_ptr()
            offsets[name] = in_bytes // vector.itemsize
        head_rows = (len(vector) - offsets["head"]) // features
        barred = head_rows - len(head)
        self.plan = Plan(
            features=features, narrow=narrow, classes=len(head), barred=barred, batch=batch, parameters=len(vector),
            kind=KINDS.index(rule.kind), lr=rule.lr, decay=rule.decay, momentum=rule.momentum, beta1=BETA1,
            beta2=BETA2, epsilon=EPSILON, proximal=proximal, clip=clip, **offsets,
        )  # fmt: skip
        self.library = library
        first, second, *_ = state.moments
        self.vectors = [vector, state.gradient[0], only(first), only(second), only(state.anchor)]
        size = self.library.room(ctypes.byref(self.plan))
        unaligned = torch.zeros(size + ALIGNMENT // vector.itemsize)
        padding = -unaligned.data_ptr() % ALIGNMENT
        self.workspace = unaligned[padding // unaligned.itemsize :]

    def __call__(self, u: Tensor, y: Tensor, index: Tensor, last: bool) -> Tensor:
        """One epoch. Gives the loss of each row in the last epoch, nothing in others."""
        u = u.float().contiguous()
        index = index.long().contiguous()
        labels = y[index].long()
        self.check(u, index, labels)
        losses = torch.zeros(index.shape) if last else None
        self.library.epoch(
            ctypes.byref(self.plan), *map(pointer, self.vectors), pointer(u), pointer(index), pointer(labels),
            ctypes.c_int64(len(index)), pointer(self.workspace), pointer(losses),
        )  # fmt: skip
        return torch.zeros(0) if losses is None else losses

    def check(self, u: Tensor, index: Tensor, labels: Tensor) -> None:
        """Checks shapes and indices: the C code has no bounds checks."""
        p = self.plan
        right_shapes = u.shape[1:] == (p.features,) and index.shape[1:] == (p.batch,)
        if not right_shapes or not inside(index, len(u)):
            raise IndexError(
                f"{tuple(index.shape)} rows of {tuple(u.shape)} are no batches of {p.batch} x {p.features}"
            )
        if not inside(labels, p.classes):
            raise IndexError(f"labels must be of the {p.classes} classes that compete")


def inside(numbers: Tensor, end: int) -> bool:
    """Whether all numbers are in [0, end)."""
    low, high = numbers.aminmax()
    return int(low) >= 0 and int(high) < end


def only(tensors: list[Tensor]) -> Tensor | None:
    """The first tensor; None for an empty list."""
    return tensors[0] if tensors else None


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    """The pointer to a tensor's data; NULL for None."""
    address = None if tensor is None else tensor.data_ptr()
    return ctypes.c_void_p(address)
