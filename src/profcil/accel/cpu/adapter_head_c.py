"""An epoch of steps on adapter and head in C, with the gradients and updates of `adapter_head_epoch`.

It takes three quarters of the time. Torch's matrix products are made for larger matrices, and every small operation
reads again from memory what the one before has written.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profcil.accel.loader import built
from profcil.engine.optim import BETA1, BETA2, EPSILON, Rule

if TYPE_CHECKING:
    from profcil.accel.cpu.adapter_head_epoch import TrainingState

KINDS = "sgd", "adam", "adamw"
ALIGNED = 64  # bytes of a line in the cache


def library() -> ctypes.CDLL | None:
    """The compiled library; None where it cannot be compiled."""
    compiled = built("cpu/adapter_head.c")
    if compiled is not None:
        compiled.room.restype = ctypes.c_int64
    return compiled


class Plan(ctypes.Structure):
    """Sizes, the offset of each tensor in the vector, and the optimiser: `Plan` in adapter_head.c."""

    _fields_ = (
        *((k, ctypes.c_int64) for k in ("features", "narrow", "classes", "barred", "batch")),
        *((k, ctypes.c_int64) for k in ("down", "down_bias", "up", "up_bias", "scale", "shift", "head", "parameters")),
        *((k, ctypes.c_int64) for k in ("kind", "time")),
        *((k, ctypes.c_double) for k in ("lr", "decay", "momentum", "beta1", "beta2", "epsilon", "proximal", "clip")),
    )


class CompiledEpochs:
    """The epochs of one phase. Vectors are updated in place; the caller must keep references to them."""

    def __init__(
        self, library: ctypes.CDLL, g: TrainingState, rule: Rule, batch: int, proximal: float, clip: float
    ) -> None:
        vector = g.vector[0]
        head = g.weights["head"]
        narrow, features = g.weights["down"].shape
        places = {k: (t.data_ptr() - vector.data_ptr()) // vector.itemsize for k, t in g.weights.items()}
        barred = (len(vector) - places["head"]) // features - len(head)
        self.plan = Plan(
            features=features, narrow=narrow, classes=len(head), barred=barred, batch=batch, parameters=len(vector),
            kind=KINDS.index(rule.kind), lr=rule.lr, decay=rule.decay, momentum=rule.momentum, beta1=BETA1,
            beta2=BETA2, epsilon=EPSILON, proximal=proximal, clip=clip, **places,
        )  # fmt: skip
        self.library = library
        self.moved = [vector, g.slope[0], *map(only, (*g.moments[:2], g.anchor))]
        size = self.library.room(ctypes.byref(self.plan)) + ALIGNED // vector.itemsize
        workspace = torch.zeros(size)
        self.room = workspace[-workspace.data_ptr() % ALIGNED // workspace.itemsize :]

    def __call__(self, u: Tensor, y: Tensor, index: Tensor, last: bool) -> Tensor:
        """One epoch. Gives the loss of each row in the last epoch, nothing in others."""
        u = u.float().contiguous()
        index = index.long().contiguous()
        labels = y[index].long()
        self.check(u, index, labels)
        losses = torch.zeros(index.shape) if last else None
        self.library.epoch(
            ctypes.byref(self.plan), *map(where, self.moved), where(u), where(index), where(labels),
            ctypes.c_int64(len(index)), where(self.room), where(losses),
        )  # fmt: skip
        return torch.zeros(0) if losses is None else losses

    def check(self, u: Tensor, index: Tensor, labels: Tensor) -> None:
        """Checks shapes and indices: the C code has no bounds checks."""
        p = self.plan
        if u.shape[1:] != (p.features,) or index.shape[1:] != (p.batch,) or not inside(index, len(u)):
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


def where(tensor: Tensor | None) -> ctypes.c_void_p:
    """The pointer to a tensor's data; NULL for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
