"""Models of several clients side by side, with what moves them: memory that recorded steps of one kind after another
may use, since no two are taken at the same time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.accel.graphs.flat_layout import At, Layout, buffers_of, filters_together, parameters_of
from profcil.accel.graphs.updates import Descent, Update
from profcil.engine.phases import Train
from profcil.model.net import MODEL, Net, Weights


class Bodies:
    """A module for each of `width` clients, its parameters views of one row of a matrix; so are its gradients, moments
    and running statistics. That makes copying in, pull, clip and update a few kernels each. Convolutions in bfloat16
    work on a copy of the matrix that is rounded once a step, and their filters' gradients stay in that type until the
    update.
    """

    def __init__(self, net: Net, phase: Train, width: int) -> None:
        pulled = [b for b in phase.blocks if b in MODEL]
        fixed = [b for b in phase.weights if b not in phase.blocks]
        self.moving = Layout(filters_together(parameters_of(net, phase.blocks)))
        self.fixed, self.noted = Layout(parameters_of(net, fixed)), Layout(buffers_of(net, phase.weights))
        self.pulled = Layout(parameters_of(net, pulled)).size
        like = torch.zeros(width, device=next(net.parameters()).device)
        self.matrix, self.still, self.buffers = (m.matrix(like) for m in (self.moving, self.fixed, self.noted))
        self.low, self.still_low = (m.matrix(like.bfloat16()) if net.bf16 else None for m in (self.moving, self.fixed))
        self.grad = torch.zeros_like(self.matrix)
        self.low_grad = None if self.low is None else torch.zeros_like(self.low)  # used for the filters, where it is
        self.anchor = torch.zeros_like(self.matrix[:, : self.pulled]) if phase.proximal else None
        self.rules = [self.rule(row, phase) for row in range(width)]
        slopes = [self.moving.views(self.grad[row], _row(self.low_grad, row)) for row in range(width)]
        self.slopes = [self.moving.flat(views.values()) for views in slopes]
        self.nets = [self.module(net, row) for row in range(width)]
        self.parameters = [[own.get_parameter(f"{b}.{k}") for b, k in self.moving.places] for own in self.nets]

    def rule(self, row: int, phase: Train) -> Update:
        made = Descent if self.low is not None and Descent.fits(self.matrix, phase.settings) else Update
        low, anchor = _row(self.low, row), _row(self.anchor, row)
        return made(phase, self.matrix[row], low, anchor, self.moving.filters())

    def module(self, net: Net, row: int) -> Net:
        """A copy of the module with its tensors in this row."""
        own = copy.deepcopy(net).train()
        for layout, high, low in ((self.moving, self.matrix, self.low), (self.fixed, self.still, self.still_low)):
            for at, value in layout.views(high[row], _row(low, row)).items():
                replace_in(own, at, Parameter(value, requires_grad=layout is self.moving))
        for at, value in self.noted.views(self.buffers[row]).items():
            replace_in(own, at, value)
        return own

    def load(self, phases: Sequence[Train]) -> None:
        """Each phase begins in a row of its own."""
        for row, phase in enumerate(phases):
            self.moving.load(self.matrix[row], phase.weights)
            self.fixed.load(self.still[row], phase.weights)
            self.noted.load(self.buffers[row], phase.weights)
            self.rules[row].reset()
        if self.anchor is not None:
            self.anchor.copy_(self.matrix[:, : self.pulled])
        if self.low is not None and self.still_low is not None:
            self.low.copy_(self.matrix)
            self.still_low.copy_(self.still)

    def descend(self, row: int, loss: Tensor) -> None:
        """One client's step down its loss."""
        grads = torch.autograd.grad(loss, self.parameters[row], materialize_grads=True)
        copy_by_type(self.slopes[row], self.moving.flat(grads))
        self.rules[row].step(self.grad[row], _row(self.low_grad, row))

    def copied(self, row: int, blocks: Sequence[str]) -> Weights:
        """These blocks of one client, as they are now."""
        found: Weights = {b: {} for b in blocks}
        for layout, matrix in ((self.moving, self.matrix), (self.noted, self.buffers)):
            for (b, k), value in layout.views(matrix[row].clone()).items():
                if b in found:
                    found[b][k] = value
        return found


def kind(phase: Train, width: int) -> tuple:
    """Phases of which this is the same can use the same bodies."""
    return phase.blocks, tuple(phase.weights), phase.proximal, phase.settings, width


def _row(matrix: Tensor | None, row: int) -> Tensor | None:
    return None if matrix is None else matrix[row]


def replace_in(net: Net, at: At, value: Tensor) -> None:
    path, _, name = f"{at[0]}.{at[1]}".rpartition(".")
    setattr(net.get_submodule(path), name, value)


def copy_by_type(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies lists of tensors of mixed types, with few kernels."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        torch._foreach_copy_([into[i] for i in chosen], [tensors[i] for i in chosen])
