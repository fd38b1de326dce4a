"""Gradients of adapter and head by hand, for one client on a CPU: most of a stream's steps are of this kind.

Autograd finds the same numbers with one matrix product more, twice the small kernels, and a fresh tensor for each. A
loss that has such a twin carries it as its `gradient`; autograd on the loss itself is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from profcil.encoders.model import Tail

Loss = TypeVar("Loss", bound=Callable[..., Tensor])
Slopes = Callable[[Mapping[str, Any]], Tensor]  # one batch: writes its slopes, and gives the loss of each row
Gradient = Callable[[Tail, Tail, int, Mapping[str, Tensor]], Slopes]  # of a tail, into another, for batches of one size


def with_gradient(gradient: Gradient) -> Callable[[Loss], Loss]:
    """Marks a loss on features whose gradient in adapter and head is written down."""

    def mark(loss: Loss) -> Loss:
        loss.gradient = gradient  # type: ignore[attr-defined]
        return loss

    return mark


class Classification:
    """Of cross_entropy(tail.classify(u), y, allowed), for a linear head.

    With n = LayerNorm(u), v = scale ⊙ n + shift, h = ReLU(down v + bias) and X = dhᵀ n, the slope of `down` is
    X ⊙ scale + Σdh shiftᵀ and that of `scale` the column sums of X ⊙ down: v itself needs none, which saves a product.
    """

    def __init__(self, tail: Tail, into: Tail, rows: int, constants: Mapping[str, Tensor]) -> None:
        self.a, self.head, self.to, self.head_to = tail.adapter, tail.head["weight"], into.adapter, into.head["weight"]
        (classes, d), narrow, new = self.head.shape, len(self.a["down"]), self.head.new_empty
        self.v, self.z, self.dz = new(rows, d), new(rows, d), new(rows, d)
        self.h, self.dh, self.x, self.scaled = new(rows, narrow), new(rows, narrow), new(narrow, d), new(narrow, d)
        self.logits, self.p = new(rows, classes), new(rows, classes)
        self.barred = torch.where(constants["allowed"], 0.0, torch.finfo(self.head.dtype).min)
        self.minus = torch.full((rows, 1), -1.0, dtype=self.head.dtype)

    @torch.no_grad()
    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        u, y = batch["u"], batch["y"].unsqueeze(1)
        n = torch.native_layer_norm(u, u.shape[1:], None, None, 1e-5)[0]
        losses = self.forward(u, n).gather(1, y).neg_()
        self.p.exp_().scatter_add_(1, y, self.minus).div_(len(u))  # ∂loss/∂logits = (softmax − one-hot) / rows
        self.backward(n)
        return losses

    def forward(self, u: Tensor, n: Tensor) -> Tensor:
        """Log-probabilities; leaves h and z."""
        a = self.a
        torch.addcmul(a["shift"], n, a["scale"], out=self.v)
        torch.mm(self.v, a["down"].T, out=self.h).add_(a["down_bias"]).relu_()
        torch.add(u, a["up_bias"], out=self.z).addmm_(self.h, a["up"].T)
        torch.addmm(self.barred, self.z, self.head.T, out=self.logits)
        return torch.log_softmax(self.logits, 1, out=self.p)

    def backward(self, n: Tensor) -> None:
        a, to = self.a, self.to
        torch.mm(self.p.T, self.z, out=self.head_to)
        torch.mm(self.p, self.head, out=self.dz)
        torch.sum(self.dz, 0, out=to["up_bias"])
        torch.mm(self.dz.T, self.h, out=to["up"])
        torch.mm(self.dz, a["up"], out=self.dh)
        torch.ops.aten.threshold_backward.grad_input(self.dh, self.h, 0, grad_input=self.dh)
        torch.sum(self.dh, 0, out=to["down_bias"])
        torch.mm(self.dh.T, n, out=self.x)
        torch.sum(torch.mul(self.x, a["down"], out=self.scaled), 0, out=to["scale"])
        torch.mv(a["down"].T, to["down_bias"], out=to["shift"])
        torch.mul(to["down_bias"].unsqueeze(1), a["shift"], out=to["down"]).addcmul_(self.x, a["scale"])
