"""An epoch of steps on adapter and head in C: the same slopes and updates as those that `descent` has written down, in
three quarters of their time. Torch's products are made for larger matrices, and every small kernel reads anew what the
one before has written."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profcil.accel.loader import built
from profcil.engine.optim import BETA1, BETA2, EPSILON, Rule

if TYPE_CHECKING:
    from profcil.accel.cpu.adapter_head_epoch import Ground

KINDS = "sgd", "adam", "adamw"
ALIGNED = 64  # bytes of a line in the cache


def library() -> ctypes.CDLL | None:
    found = built("cpu/adapter_head.c")
    if found is not None:
        found.room.restype = ctypes.c_int64
    return found


class Plan(ctypes.Structure):
    """Sizes, where each tensor begins in the vector, and the rule: `Plan` in adapter_head.c."""

    _fields_ = (
        *((k, ctypes.c_int64) for k in ("features", "narrow", "classes", "barred", "batch")),
        *((k, ctypes.c_int64) for k in ("down", "down_bias", "up", "up_bias", "scale", "shift", "head", "parameters")),
        *((k, ctypes.c_int64) for k in ("kind", "time")),
        *((k, ctypes.c_double) for k in ("lr", "decay", "momentum", "beta1", "beta2", "epsilon", "proximal", "clip")),
    )


class Epochs:
    """The epochs of one phase. Its vectors are moved in place; whoever made them keeps them."""

    def __init__(self, library: ctypes.CDLL, g: Ground, rule: Rule, batch: int, proximal: float, clip: float) -> None:
        vector, head, (narrow, features) = g.vector[0], g.weights["head"], g.weights["down"].shape
        places = {k: (t.data_ptr() - vector.data_ptr()) // vector.itemsize for k, t in g.weights.items()}
        barred = (len(vector) - places["head"]) // features - len(head)
        self.plan = Plan(
            features=features, narrow=narrow, classes=len(head), barred=barred, batch=batch, parameters=len(vector),
            kind=KINDS.index(rule.kind), lr=rule.lr, decay=rule.decay, momentum=rule.momentum, beta1=BETA1,
            beta2=BETA2, epsilon=EPSILON, proximal=proximal, clip=clip, **places,
        )  # fmt: skip
        self.library, self.moved = library, [vector, g.slope[0], *map(only, (*g.moments[:2], g.anchor))]
        room = torch.zeros(self.library.room(ctypes.byref(self.plan)) + ALIGNED // vector.itemsize)
        self.room = room[-room.data_ptr() % ALIGNED // room.itemsize :]

    def __call__(self, u: Tensor, y: Tensor, index: Tensor, last: bool) -> Tensor:
        """Gives the loss of each row, where it is the last."""
        u, index, labels = u.float().contiguous(), index.long().contiguous(), y[index].long()
        self.check(u, index, labels)
        losses = torch.zeros(index.shape) if last else None
        self.library.epoch(
            ctypes.byref(self.plan), *map(where, self.moved), where(u), where(index), where(labels),
            ctypes.c_int64(len(index)), where(self.room), where(losses),
        )  # fmt: skip
        return torch.zeros(0) if losses is None else losses

    def check(self, u: Tensor, index: Tensor, labels: Tensor) -> None:
        """What is in C looks at nothing, and would read and write wherever it is sent."""
        p = self.plan
        if u.shape[1:] != (p.features,) or index.shape[1:] != (p.batch,) or not inside(index, len(u)):
            raise IndexError(
                f"{tuple(index.shape)} rows of {tuple(u.shape)} are no batches of {p.batch} x {p.features}"
            )
        if not inside(labels, p.classes):
            raise IndexError(f"labels must be of the {p.classes} classes that compete")


def inside(numbers: Tensor, end: int) -> bool:
    low, high = numbers.aminmax()
    return int(low) >= 0 and int(high) < end


def only(tensors: list[Tensor]) -> Tensor | None:
    return tensors[0] if tensors else None


def where(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
