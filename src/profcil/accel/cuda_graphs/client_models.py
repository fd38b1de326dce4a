"""The models, gradients and optimiser state of several clients, in memory that recorded steps share.

Different kinds of steps may use the same memory, because no two of them run at the same time.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.accel.cuda_graphs.flat_layout import FlatLayout, TensorName, buffers_of, parameters_of, sorted_for_row
from profcil.accel.cuda_graphs.updates import FusedUpdate, Update
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
        anchored = [b for b in phase.blocks if b in MODEL]
        frozen = [b for b in phase.weights if b not in phase.blocks]
        self.trained_layout = FlatLayout(sorted_for_row(parameters_of(net, phase.blocks)))
        self.frozen_layout = FlatLayout(sorted_for_row(parameters_of(net, frozen)))
        self.buffer_layout = FlatLayout(buffers_of(net, phase.weights))
        self.anchored = FlatLayout(parameters_of(net, anchored)).size  # leading columns with a proximal term
        like = torch.zeros(width, device=next(net.parameters()).device)
        self.matrix = self.trained_layout.matrix(like)
        self.frozen = self.frozen_layout.matrix(like)
        self.buffers = self.buffer_layout.matrix(like)
        self.grad = torch.zeros_like(self.matrix)
        self.low: Tensor | None = None
        self.frozen_low: Tensor | None = None
        self.low_grad: Tensor | None = None
        if net.bf16:
            self.low = self.trained_layout.matrix(like.bfloat16())
            self.frozen_low = self.frozen_layout.matrix(like.bfloat16())
            self.low_grad = torch.zeros_like(self.low)  # only its filter columns are used
        self.anchor = torch.zeros_like(self.matrix[:, : self.anchored]) if phase.proximal else None
        self.rules = [self.rule(row, phase) for row in range(width)]
        self.grad_pieces = [self.flat_gradients(row) for row in range(width)]
        self.nets = [self.module(net, row) for row in range(width)]
        self.parameters = [self.trained_parameters(own) for own in self.nets]

    def flat_gradients(self, row: int) -> list[Tensor]:
        """The gradients of one client's parameters, flattened, as views of its row."""
        views = self.trained_layout.views(self.grad[row], _row(self.low_grad, row))
        return self.trained_layout.flat(views.values())

    def trained_parameters(self, own: Net) -> list[Parameter]:
        """The trained parameters of a module, in the order of a row."""
        return [own.get_parameter(f"{b}.{k}") for b, k in self.trained_layout.places]

    def rule(self, row: int, phase: Train) -> Update:
        """The update of one client's row, by kernels where they support it."""
        by_kernels = self.low is not None and FusedUpdate.fits(self.matrix, phase.settings)
        update_class = FusedUpdate if by_kernels else Update
        low = _row(self.low, row)
        anchor = _row(self.anchor, row)
        return update_class(phase, self.matrix[row], low, anchor, self.trained_layout.filters())

    def module(self, net: Net, row: int) -> Net:
        """A copy of the module whose tensors are views of this row."""
        own = copy.deepcopy(net).train()
        trained = self.trained_layout.views(self.matrix[row], _row(self.low, row))
        for name, value in trained.items():
            replace_in(own, name, Parameter(value))
        frozen = self.frozen_layout.views(self.frozen[row], _row(self.frozen_low, row))
        for name, value in frozen.items():
            replace_in(own, name, Parameter(value, requires_grad=False))
        buffers = self.buffer_layout.views(self.buffers[row])
        for name, value in buffers.items():
            replace_in(own, name, value)
        return own

    def load(self, phases: Sequence[Train]) -> None:
        """Copies the weights of each phase into its row and resets the optimisers."""
        for row, phase in enumerate(phases):
            self.trained_layout.load(self.matrix[row], phase.weights)
            self.frozen_layout.load(self.frozen[row], phase.weights)
            self.buffer_layout.load(self.buffers[row], phase.weights)
            self.rules[row].reset()
        if self.anchor is not None:
            self.anchor.copy_(self.matrix[:, : self.anchored])
        if self.low is not None and self.frozen_low is not None:
            self.low.copy_(self.matrix)
            self.frozen_low.copy_(self.frozen)

    def update(self, row: int, loss: Tensor) -> None:
        """One optimiser step of one client."""
        grads = torch.autograd.grad(loss, self.parameters[row], materialize_grads=True)
        copy_by_type(self.grad_pieces[row], self.trained_layout.flat(grads))
        self.rules[row].step(self.grad[row], _row(self.low_grad, row))

    def copied(self, row: int, blocks: Sequence[str]) -> Weights:
        """A copy of these blocks of one client."""
        weights: Weights = {b: {} for b in blocks}
        for layout, matrix in ((self.trained_layout, self.matrix), (self.buffer_layout, self.buffers)):
            for (b, k), value in layout.views(matrix[row].clone()).items():
                if b in weights:
                    weights[b][k] = value
        return weights


def model_key(phase: Train, width: int) -> tuple:
    """A key: phases with equal keys can use the same models."""
    return phase.blocks, tuple(phase.weights), phase.proximal, phase.settings, width


def _row(matrix: Tensor | None, row: int) -> Tensor | None:
    return None if matrix is None else matrix[row]


def replace_in(net: Net, name: TensorName, value: Tensor) -> None:
    """Replaces a parameter or buffer of a model."""
    block, tensor = name
    module, _, attribute = f"{block}.{tensor}".rpartition(".")
    setattr(net.get_submodule(module), attribute, value)


def copy_by_type(into: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copies a list of tensors of mixed types with one kernel launch a type."""
    dtypes = dict.fromkeys(t.dtype for t in tensors)
    for dtype in dtypes:
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for target, source in zip(into, tensors, strict=True):
            if source.dtype == dtype:
                targets.append(target)
                sources.append(source)
        torch._foreach_copy_(targets, sources)
