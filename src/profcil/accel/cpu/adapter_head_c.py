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
from profcil.engine.steps import BETA1, BETA2, EPSILON, Rule

if TYPE_CHECKING:
    from profcil.accel.cpu.adapter_head_epoch import EpochState

KINDS = "sgd", "adam", "adamw"
ALIGNMENT = 64  # bytes of a line in the cache


def library() -> ctypes.CDLL | None:
    """The compiled library; None where it cannot be compiled."""
    compiled = c_library("cpu/adapter_head.c")
    if compiled is not None:
        compiled.workspace_size.restype = ctypes.c_int64
    return compiled


SIZES = ("features", "narrow", "classes", "barred", "batch")
OFFSETS = ("down", "down_bias", "up", "up_bias", "scale", "shift", "head")
INTEGERS = (*SIZES, *OFFSETS, "parameters", "kind", "time")
NUMBERS = ("lr", "decay", "momentum", "beta1", "beta2", "epsilon", "proximal", "clip")


class EpochPlan(ctypes.Structure):
    """Sizes, the offset of each tensor in the vector, and the optimiser: `EpochPlan` in adapter_head.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in NUMBERS),
    )


class CompiledEpochs:
    """The epochs of one phase. Vectors are updated in place; the caller must keep references to them."""

    def __init__(
        self, library: ctypes.CDLL, state: EpochState, rule: Rule, batch: int, proximal: float, clip: float
    ) -> None:
        vector = state.vector[0]
        head = state.weights["head"]
        narrow, features = state.weights["down"].shape
        offsets = {}
        for name, tensor in state.weights.items():
            in_bytes = tensor.data_ptr() - vector.data_ptr()
            offsets[name] = in_bytes // vector.itemsize
        head_numbers = len(vector) - offsets["head"]
        barred = head_numbers // features - len(head)
        sizes = {"features": features, "narrow": narrow, "classes": len(head), "barred": barred, "batch": batch}
        moments = {"momentum": rule.momentum, "beta1": BETA1, "beta2": BETA2, "epsilon": EPSILON}
        optimiser = {"kind": KINDS.index(rule.kind), "lr": rule.lr, "decay": rule.decay, **moments}
        limits = {"proximal": proximal, "clip": clip}
        self.plan = EpochPlan(**sizes, **offsets, parameters=len(vector), **optimiser, **limits)
        self.library = library
        first, second, *_ = state.moments
        self.vectors = [vector, state.gradient[0], only(first), only(second), only(state.anchor)]
        size = self.library.workspace_size(ctypes.byref(self.plan))
        self.workspace = aligned_zeros(size)

    def __call__(self, u: Tensor, y: Tensor, index: Tensor, last: bool) -> Tensor:
        """One epoch. Gives the loss of each row in the last epoch, nothing in others."""
        u = u.float().contiguous()
        index = index.long().contiguous()
        labels = y[index].long()
        self.check(u, index, labels)
        losses = torch.zeros(index.shape) if last else None
        vectors = [pointer(vector) for vector in self.vectors]
        steps = ctypes.c_int64(len(index))
        data = (pointer(u), pointer(index), pointer(labels), steps)
        self.library.epoch(ctypes.byref(self.plan), *vectors, *data, pointer(self.workspace), pointer(losses))
        return torch.zeros(0) if losses is None else losses

    def check(self, u: Tensor, index: Tensor, labels: Tensor) -> None:
        """Checks shapes and indices: the C code has no bounds checks."""
        p = self.plan
        are_features = u.shape[1:] == (p.features,)
        are_batches = index.shape[1:] == (p.batch,)
        if not are_features or not are_batches or not inside(index, len(u)):
            given = f"{tuple(index.shape)} rows of {tuple(u.shape)}"
            raise IndexError(f"{given} are no batches of {p.batch} x {p.features}")
        if not inside(labels, p.classes):
            raise IndexError(f"labels must be of the {p.classes} classes that compete")


def aligned_zeros(size: int) -> Tensor:
    """At least this many zeros, beginning at a line of the cache."""
    per_line = ALIGNMENT // torch.float32.itemsize
    unaligned = torch.zeros(size + per_line, dtype=torch.float32)
    padding = -unaligned.data_ptr() % ALIGNMENT
    return unaligned[padding // unaligned.itemsize :]


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
