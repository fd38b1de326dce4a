"""SGD and Adam as in-place updates of tensor lists, with no host synchronisation.

torch's own optimisers would do for one client. These also update the first `rows` clients of a stack, where the
others have already finished their epoch, and clip each client by its own gradient norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.config import TrainSettings


def clip_(grads: Sequence[Tensor], limit: float, stacked: bool) -> None:
    """Scales gradients to a norm of at most `limit`, for each client of a stack by itself."""
    if not limit:
        return
    if stacked:
        norm = sum(g.flatten(1).square().sum(1) for g in grads).sqrt()  # type: ignore[union-attr]
    else:
        norm = torch.stack(torch._foreach_norm(list(grads))).norm()
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor.view(-1, *[1] * (g.dim() - 1)) if stacked else factor)


class Optimiser:
    """The update rule of one phase; its moments live as long as the phase."""

    def __init__(self, settings: TrainSettings, parameters: Sequence[Tensor]) -> None:
        self.s, self.parameters, self.time = settings, list(parameters), 0
        self.times = torch.zeros(len(self.parameters[0]), device=self.parameters[0].device)  # of each row of a stack
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters] if settings.optimiser == "adam" else []

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rows: int | None = None) -> None:
        self.time += 1
        part = (lambda ts: [t[:rows] for t in ts]) if rows is not None else list
        p, g, m, s = part(self.parameters), list(grads), part(self.first), self.s
        coupled = s.optimiser == "sgd" or s.decay == "coupled"
        if s.weight_decay and coupled:
            torch._foreach_add_(g, p, alpha=s.weight_decay)
        if s.optimiser == "sgd":
            torch._foreach_mul_(m, s.momentum)
            torch._foreach_add_(m, g)
            torch._foreach_add_(p, m, alpha=-s.lr)
            return
        if s.weight_decay and not coupled:
            torch._foreach_mul_(p, 1 - s.lr * s.weight_decay)
        v = part(self.second)
        torch._foreach_lerp_(m, g, 1 - 0.9)
        torch._foreach_mul_(v, 0.999)
        torch._foreach_addcmul_(v, g, g, 1 - 0.999)
        root = torch._foreach_sqrt(v)
        if rows is None:
            torch._foreach_div_(root, (1 - 0.999**self.time) ** 0.5)
            torch._foreach_add_(root, 1e-8)
            torch._foreach_addcdiv_(p, m, root, -s.lr / (1 - 0.9**self.time))
            return
        self.times[:rows] += 1  # clients with a shorter epoch have taken fewer steps
        for param, moment, r in zip(p, m, root, strict=True):
            t = self.times[:rows].view(-1, *[1] * (param.dim() - 1))
            r.div_((1 - 0.999**t).sqrt()).add_(1e-8)
            param.sub_(s.lr / (1 - 0.9**t) * moment / r)
