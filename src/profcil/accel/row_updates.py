"""Clipping and updates of a stack of clients, one client in each row. Clients that have finished their epoch do not
move, so each row has its own number of steps; each is clipped by its own gradient norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.config import TrainSettings
from profcil.engine.steps import BETA1, BETA2, EPSILON


def clip_rows_(grads: Sequence[Tensor], limit: float) -> None:
    """Scales the gradients of each row to a norm of at most `limit`; 0 = no limit."""
    if not limit:
        return
    squares = sum(g.flatten(1).square().sum(1) for g in grads)
    norms = squares.sqrt()  # type: ignore[union-attr]
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(per_row(factors, g))


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """One value for each row of `like`, with axes for broadcasting."""
    return values.view(-1, *[1] * (like.dim() - 1))


class RowOptimiser:
    """The update rule of a stack; only the first rows move."""

    def __init__(self, settings: TrainSettings, parameters: Sequence[Tensor]) -> None:
        self.s = settings
        self.parameters = list(parameters)
        self.adam = settings.optimiser == "adam"
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters] if self.adam else []
        some = self.parameters[0]
        self.times = torch.zeros(len(some), device=some.device)  # updates of each row

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rows: int) -> None:
        """One update of the first `rows` clients from their gradients, which may be overwritten."""
        if self.adam:
            self.adam_rows(list(grads), rows)
        else:
            self.sgd_rows(list(grads), rows)

    def sgd_rows(self, g: list[Tensor], rows: int) -> None:
        s = self.s
        p = [t[:rows] for t in self.parameters]
        m = [t[:rows] for t in self.first]
        torch._foreach_add_(g, p, alpha=s.weight_decay)
        torch._foreach_mul_(m, s.momentum)
        torch._foreach_add_(m, g)
        torch._foreach_add_(p, m, alpha=-s.lr)

    def adam_rows(self, g: list[Tensor], rows: int) -> None:
        s = self.s
        p = [t[:rows] for t in self.parameters]
        m = [t[:rows] for t in self.first]
        v = [t[:rows] for t in self.second]
        self.times[:rows] += 1
        if s.decay == "coupled":
            torch._foreach_add_(g, p, alpha=s.weight_decay)
        else:
            torch._foreach_mul_(p, 1 - s.lr * s.weight_decay)
        torch._foreach_lerp_(m, g, 1 - BETA1)
        torch._foreach_mul_(v, BETA2)
        torch._foreach_addcmul_(v, g, g, 1 - BETA2)
        for param, moment, root in zip(p, m, torch._foreach_sqrt(v), strict=True):
            t = per_row(self.times[:rows], param)
            correction = (1 - BETA2**t).sqrt()
            root.div_(correction).add_(EPSILON)
            step = moment * (-s.lr / (1 - BETA1**t))
            param.addcdiv_(step, root)
