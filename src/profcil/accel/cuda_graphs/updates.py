"""Proximal term, clipping and update of one client's row, or of a matrix with one client in each row.

On a GPU, SGD uses fused kernels that pass over the memory twice (`triton.sgd`). The versions in plain torch are the
reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from profcil.accel.loader import kernel_module
from profcil.accel.row_updates import clip_rows_
from profcil.config import TrainSettings
from profcil.engine.phases import Train
from profcil.engine.steps import BETA1, BETA2, EPSILON, Optimiser


class Update:
    """Proximal term, clipping and update of one client's row; then the bfloat16 copy is refreshed."""

    def __init__(self, phase: Train, row: Tensor, low: Tensor | None, anchor: Tensor | None, filters: slice) -> None:
        self.row = row
        self.low = low
        self.anchor = anchor
        self.filters = filters
        self.s = phase.settings
        self.twice = 2 * phase.proximal  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        self.optimiser = Optimiser(phase.settings, [row])

    def reset(self) -> None:
        self.optimiser.reset()

    def step(self, grad: Tensor, low_grad: Tensor | None) -> None:
        """One update in place. With `low_grad`, the filters' gradients are read from there."""
        if low_grad is not None:
            grad[self.filters].copy_(low_grad[self.filters])
        if self.anchor is not None:
            n = len(self.anchor)
            grad[:n].add_(self.row[:n] - self.anchor, alpha=self.twice)
        excess = None
        if self.s.clip:
            norm = grad.norm() + 1e-6
            excess = (norm / self.s.clip).clamp(min=1.0)
        self.optimiser.step([grad], excess=excess)
        if self.low is not None:
            self.low.copy_(self.row)


class FusedUpdate(Update):
    """`Update` for SGD in bfloat16 on a GPU, by fused kernels that pass over the row twice."""

    def __init__(self, phase: Train, row: Tensor, low: Tensor | None, anchor: Tensor | None, filters: slice) -> None:
        super().__init__(phase, row, low, anchor, filters)
        self.partial = row.new_zeros(_kernels().pieces(row))

    @staticmethod
    def fits(matrix: Tensor, settings: TrainSettings) -> bool:
        """Whether the kernels support this matrix and optimiser."""
        return matrix.is_cuda and settings.optimiser == "sgd" and _kernels() is not None

    def step(self, grad: Tensor, low_grad: Tensor | None) -> None:
        grads = (grad, low_grad, self.filters)
        _kernels().squares(*grads, self.row, self.anchor, self.twice, self.partial)
        norm = self.partial.sum().sqrt() + 1e-6
        excess = (norm / self.s.clip).clamp(min=1.0) if self.s.clip else torch.ones_like(norm)
        moment = self.optimiser.moments.first[0]
        tensors = (self.row, moment, self.anchor, self.low, excess)
        _kernels().descend(*grads, *tensors, self.twice, self.s.lr, self.s.momentum, self.s.weight_decay)


class MaskedUpdate:
    """Proximal term, clipping and update of a matrix with one client in each row, of which some are inactive.

    A mask on the device says which rows are active, because a CUDA graph needs fixed shapes. Inactive rows may be NaN,
    so they are excluded by `where` and `masked_fill`, not by a product with 0.
    """

    def __init__(self, settings: TrainSettings, matrix: Tensor, proximal: float = 0.0) -> None:
        self.s = settings
        self.p = matrix
        self.twice = 2 * proximal  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        self.anchor = matrix.new_zeros(matrix.shape) if proximal else None
        self.first = matrix.new_zeros(matrix.shape)
        self.second = matrix.new_zeros(matrix.shape)
        self.times = matrix.new_zeros(len(matrix), 1)  # updates of each row
        self.beta1 = matrix.new_tensor(BETA1)
        self.beta2 = matrix.new_tensor(BETA2)

    def reset(self) -> None:
        """Starts a phase: the moments become 0, and the matrix becomes the anchor of the proximal term."""
        torch._foreach_zero_([self.first, self.second, self.times])
        if self.anchor is not None:
            self.anchor.copy_(self.p)

    @torch.no_grad()
    def step(self, g: Tensor, active: Tensor) -> None:
        """One update of the active rows. The gradient is overwritten."""
        if self.anchor is not None:
            g.add_(self.p - self.anchor, alpha=self.twice)
        clip_rows_([g], self.s.clip)
        inactive = ~active.unsqueeze(1)
        if self.s.optimiser == "adam":
            self.adam(g, inactive)
        else:
            self.sgd(g, inactive)

    def sgd(self, g: Tensor, inactive: Tensor) -> None:
        s = self.s
        p = self.p
        m = self.first
        g.add_(p, alpha=s.weight_decay)
        new_m = (m * s.momentum).add_(g)
        m.copy_(torch.where(inactive, m, new_m))
        p.add_(m.masked_fill(inactive, 0.0), alpha=-s.lr)

    def adam(self, g: Tensor, inactive: Tensor) -> None:
        s = self.s
        p = self.p
        m = self.first
        v = self.second
        t = self.times.add_(~inactive).clamp(min=1)
        if s.decay == "coupled":
            g.add_(p, alpha=s.weight_decay)
        else:
            decayed = p * (1 - s.lr * s.weight_decay)
            p.copy_(torch.where(inactive, p, decayed))
        new_m = m.lerp(g, 1 - BETA1)
        m.copy_(torch.where(inactive, m, new_m))
        new_v = (v * BETA2).addcmul_(g, g, value=1 - BETA2)
        v.copy_(torch.where(inactive, v, new_v))
        correction = (1 - self.beta2**t).sqrt()
        root = v.sqrt().div_(correction).add_(EPSILON)
        step = m * (-s.lr / (1 - self.beta1**t))
        p.addcdiv_(step.masked_fill(inactive, 0.0), root)


class FusedMaskedUpdate(MaskedUpdate):
    """`MaskedUpdate` for SGD on a GPU, by fused kernels that pass over the matrix twice."""

    def __init__(self, settings: TrainSettings, matrix: Tensor, proximal: float = 0.0) -> None:
        super().__init__(settings, matrix, proximal)
        self.partial = matrix.new_zeros(len(matrix), _kernels().pieces(matrix))

    @torch.no_grad()
    def step(self, g: Tensor, active: Tensor) -> None:
        s = self.s
        _kernels().squares_of_rows(g, self.p, self.anchor, self.twice, self.partial)
        tensors = (self.p, self.first, self.anchor, self.partial)
        _kernels().descend_rows(g, *tensors, s.clip, active, self.twice, s.lr, s.momentum, s.weight_decay)


def _kernels() -> Any:
    return kernel_module("triton.sgd")
