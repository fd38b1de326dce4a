"""The gradient of adapter and head by hand, for one client on a CPU, where most of a stream's steps are of this kind.

Autograd finds the same numbers with one matrix product more and twice the small kernels. With n = LayerNorm(u) and
v = scale ⊙ n + shift, the features need no gradient: dscale comes from X = dhᵀ n, which d down = X ⊙ scale + Σdh shiftᵀ
needs anyway. A loss that has such a twin carries it as its `gradient`; autograd on the loss itself is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from profcil.encoders.model import Tail

Loss = TypeVar("Loss", bound=Callable[..., Tensor])
Gradient = Callable[[Tail, Mapping[str, Any], Tail], Tensor]  # (tail, batch, where slopes are written) → the loss


def with_gradient(gradient: Gradient) -> Callable[[Loss], Loss]:
    """Marks a loss on features whose gradient in adapter and head is known in closed form."""

    def mark(loss: Loss) -> Loss:
        loss.gradient = gradient  # type: ignore[attr-defined]
        return loss

    return mark


def gradient_of(loss: Callable[..., Tensor]) -> Gradient | None:
    return getattr(loss, "gradient", None)


@torch.no_grad()
def classification(tail: Tail, batch: Mapping[str, Any], into: Tail) -> Tensor:
    """Of cross_entropy(tail.classify(u), y, allowed), for a linear head."""
    u, y, a, to, weight = batch["u"], batch["y"].unsqueeze(1), tail.adapter, into.adapter, tail.head["weight"]
    n = torch.native_layer_norm(u, u.shape[1:], None, None, 1e-5)[0]
    h = torch.mm(torch.addcmul(a["shift"], n, a["scale"]), a["down"].T).add_(a["down_bias"]).relu_()
    z = (u + a["up_bias"]).addmm_(h, a["up"].T)
    barred = torch.where(batch["allowed"], 0.0, torch.finfo(u.dtype).min)
    p = torch.addmm(barred, z, weight.T).log_softmax(1)
    loss = p.gather(1, y).mean().neg_()
    p.exp_().scatter_add_(1, y, u.new_full(y.shape, -1.0)).div_(len(u))  # ∂loss/∂logits = (softmax − one-hot) / n
    torch.mm(p.T, z, out=into.head["weight"])
    dz = torch.mm(p, weight)
    torch.sum(dz, 0, out=to["up_bias"])
    torch.mm(dz.T, h, out=to["up"])
    dh = torch.ops.aten.threshold_backward(torch.mm(dz, a["up"]), h, 0)
    along = torch.sum(dh, 0, out=to["down_bias"])
    x = torch.mm(dh.T, n)
    torch.sum(x * a["down"], 0, out=to["scale"])
    torch.mv(a["down"].T, along, out=to["shift"])
    torch.mul(along[:, None], a["shift"], out=to["down"]).addcmul_(x, a["scale"])
    return loss
