"""The models, gradients and optimiser state of several clients, in memory that recorded steps share.

Different kinds of steps may use the same memory, because no two of them run at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.accel.graphs.flat_layout import At, Layout, buffers_of, parameters_of, sorted_for_row
from profcil.accel.graphs.updates import FusedUpdate, Update
from profcil.engine.phases import Train
from profcil.model.net import MODEL, Net, Weights


class ClientModels:
    """One module for each of `width` clients.

    A module's parameters are views of one row of a matrix. So are its gradients, moments and running statistics.
    Loading, proximal term, clipping and update are then a few kernel launches each. In bfloat16, convolutions use a
    copy of the matrix that is rounded once a step, and the gradients of their filters stay in bfloat16 until the
    update.
    """

    def __init__(self, net: Net, phase: Train, width: int) -> None:
        pulled = [b for b in phase.blocks if b in MODEL]
        fixed = [b for b in phase.weights if b not in phase.blocks]
        self.moving = Layout(sorted_for_row(parameters_of(net, phase.blocks)))
        self.fixed = Layout(sorted_for_row(parameters_of(net, fixed)))
        self.noted = Layout(buffers_of(net, phase.weights))
        self.pulled = Layout(parameters_of(net, pulled)).size
        like = torch.zeros(width, device=next(net.parameters()).device)
        self.matrix = self.moving.matrix(like)
        self.still = self.fixed.matrix(like)
        self.buffers = self.noted.matrix(like)
        self.low = self.moving.matrix(like.bfloat16()) if net.bf16 else None
        self.frozen_low = self.fixed.matrix(like.bfloat16()) if net.bf16 else None
        self.grad = torch.zeros_like(self.matrix)
        self.low_grad = None if self.low is None else torch.zeros_like(self.low)  # only its filter columns are used
        self.anchor = torch.zeros_like(self.matrix[:, : self.pulled]) if phase.proximal else None
        self.rules = [self.rule(row, phase) for row in range(width)]
        gradients = [self.moving.views(self.grad[row], _row(self.low_grad, row)) for row in range(width)]
        self.slopes = [self.moving.flat(views.values()) for views in gradients]
        self.nets = [self.module(net, row) for row in range(width)]
        self.parameters = [[own.get_parameter(f"{b}.{k}") for b, k in self.moving.places] for own in self.nets]

    def rule(self, row: int, phase: Train) -> Update:
        """The update of one client's row, by kernels where they support it."""
        by_kernels = self.low is not None and FusedUpdate.fits(self.matrix, phase.settings)
        update_class = FusedUpdate if by_kernels else Update
        low = _row(self.low, row)
        anchor = _row(self.anchor, row)
        return update_class(phase, self.matrix[row], low, anchor, self.moving.filters())

    def module(self, net: Net, row: int) -> Net:
        """A copy of the module whose tensors are views of this row."""
        own = copy.deepcopy(net).train()
        for layout, high, low in ((self.moving, self.matrix, self.low), (self.fixed, self.still, self.frozen_low)):
            for at, value in layout.views(high[row], _row(low, row)).items():
                replace_in(own, at, Parameter(value, requires_grad=layout is self.moving))
        for at, value in self.noted.views(self.buffers[row]).items():
            replace_in(own, at, value)
        return own

    def load(self, phases: Sequence[Train]) -> None:
        """Copies the weights of each phase into its row and resets the optimisers."""
        for row, phase in enumerate(phases):
            self.moving.load(self.matrix[row], phase.weights)
            self.fixed.load(self.still[row], phase.weights)
            self.noted.load(self.buffers[row], phase.weights)
            self.rules[row].reset()
        if self.anchor is not None:
            self.anchor.copy_(self.matrix[:, : self.pulled])
        if self.low is not None and self.frozen_low is not None:
            self.low.copy_(self.matrix)
            self.frozen_low.copy_(self.still)

    def descend(self, row: int, loss: Tensor) -> None:
        """One optimiser step of one client."""
        grads = torch.autograd.grad(loss, self.parameters[row], materialize_grads=True)
        copy_by_type(self.slopes[row], self.moving.flat(grads))
        self.rules[row].step(self.grad[row], _row(self.low_grad, row))

    def copied(self, row: int, blocks: Sequence[str]) -> Weights:
        """A copy of these blocks of one client."""
        weights: Weights = {b: {} for b in blocks}
        for layout, matrix in ((self.moving, self.matrix), (self.noted, self.buffers)):
            for (b, k), value in layout.views(matrix[row].clone()).items():
                if b in weights:
                    weights[b][k] = value
        return weights


def kind(phase: Train, width: int) -> tuple:
    """A key: phases with equal keys can use the same models."""
    return phase.blocks, tuple(phase.weights), phase.proximal, phase.settings, width


def _row(matrix: Tensor | None, row: int) -> Tensor | None:
    return None if matrix is None else matrix[row]


def replace_in(net: Net, at: At, value: Tensor) -> None:
    """Replaces a parameter or buffer of a model."""
    path, _, name = f"{at[0]}.{at[1]}".rpartition(".")
    setattr(net.get_submodule(path), name, value)


def copy_by_type(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies a list of tensors of mixed types with one kernel launch a type."""
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        torch._foreach_copy_([into[i] for i in chosen], [tensors[i] for i in chosen])
