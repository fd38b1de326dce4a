"""SGD and Adam as in-place updates of tensor lists, with no host synchronisation.

For one client torch's fused kernels do the work. A stack of clients needs more than torch's optimisers offer: clients
that have finished their epoch stand still, so each row has taken its own number of steps; and each client is clipped
by its own gradient norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from profcil.config import TrainSettings

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


def clip_(grads: Sequence[Tensor], limit: float, stacked: bool) -> None:
    """Scales gradients to a norm of at most `limit`, for each client of a stack by itself."""
    if not limit:
        return
    if not stacked and grads[0].device.type == "cpu":  # where reading a number is free, and a dot product fastest
        norm = sum(float(torch.dot(g, g)) for g in (g.reshape(-1) for g in grads)) ** 0.5
        if not norm + 1e-6 <= limit:
            torch._foreach_mul_(list(grads), limit / (norm + 1e-6))
        return
    if not stacked:
        norms = torch.stack(torch._foreach_norm(list(grads))).norm()
        torch._foreach_mul_(list(grads), (limit / (norms + 1e-6)).clamp(max=1.0))
        return
    norms = sum(g.flatten(1).square().sum(1) for g in grads).sqrt()  # type: ignore[union-attr]
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factors.view(-1, *[1] * (g.dim() - 1)))


def clip_vector_(grad: Tensor, limit: float) -> None:
    """The same for one vector on a CPU, in words that TorchScript reads."""
    if limit != 0:
        norm = float(torch.dot(grad, grad)) ** 0.5
        if not norm + 1e-6 <= limit:
            grad.mul_(limit / (norm + 1e-6))


class Rule(NamedTuple):
    """Which update, and by how much."""

    kind: str  # sgd, adam or adamw
    lr: float
    decay: float
    momentum: float


class Moments(NamedTuple):
    """What an update remembers of earlier gradients, for each tensor, and of how many."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


def fused(
    p: list[Tensor],
    grads: list[Tensor],
    m: Moments,
    rule: Rule,
    excess: Tensor | None = None,
    betas: tuple[float, float] = (BETA1, BETA2),
    eps: float = EPSILON,
) -> None:
    """One update by torch's fused kernels, in words that TorchScript reads."""
    lr, decay = rule.lr, rule.decay
    if rule.kind == "sgd":
        torch._fused_sgd_(
            p, grads, m.first if rule.momentum != 0 else [], weight_decay=decay, momentum=rule.momentum, lr=lr,
            dampening=0.0, nesterov=False, maximize=False, is_first_step=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip
        return
    torch._foreach_add_(m.steps, 1)
    if rule.kind == "adam":
        torch._fused_adam_(
            p, grads, m.first, m.second, [], m.steps, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip
    else:
        torch._fused_adamw_(
            p, grads, m.first, m.second, [], m.steps, lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=decay,
            eps=eps, amsgrad=False, maximize=False, grad_scale=excess, found_inf=None,
        )  # fmt: skip


class Optimiser:
    """The update rule of one phase; its moments live as long as the phase."""

    def __init__(self, settings: TrainSettings, parameters: Sequence[Tensor]) -> None:
        self.s, self.parameters, self.time = settings, list(parameters), 0
        self.adam = settings.optimiser == "adam"
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros_like(p) for p in self.parameters] if self.adam else []
        device = self.parameters[0].device
        self.times = torch.zeros(len(self.parameters[0]), device=device)  # steps each row of a stack has taken
        self.steps = [torch.zeros((), device=device) for _ in self.parameters]
        kind = "sgd" if not self.adam else "adam" if settings.decay == "coupled" else "adamw"
        self.rule = Rule(kind, settings.lr, settings.weight_decay, settings.momentum)
        self.moments = Moments(self.first, self.second, self.steps)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], rows: int | None = None, *, excess: Tensor | None = None) -> None:
        """One update from these gradients, which may be overwritten and are divided by `excess`, a number on the
        device; of the first `rows` clients of a stack."""
        self.time += 1
        if rows is None:
            flat = [g.contiguous() for g in grads]  # kernels read memory in order, without strides
            fused(self.parameters, flat, self.moments, self.rule, excess)
        elif self.adam:
            self._adam_rows(list(grads), rows)
        else:
            self._sgd_rows(list(grads), rows)

    def reset(self) -> None:
        """As at the start of a phase, on the same tensors."""
        torch._foreach_zero_([*self.first, *self.second, *self.steps, self.times])
        self.time = 0

    def _sgd_rows(self, g: list[Tensor], rows: int) -> None:
        s, p, m = self.s, _top(self.parameters, rows), _top(self.first, rows)
        torch._foreach_add_(g, p, alpha=s.weight_decay)
        torch._foreach_mul_(m, s.momentum)
        torch._foreach_add_(m, g)
        torch._foreach_add_(p, m, alpha=-s.lr)

    def _adam_rows(self, g: list[Tensor], rows: int) -> None:
        s, p = self.s, _top(self.parameters, rows)
        m, v = _top(self.first, rows), _top(self.second, rows)
        self.times[:rows] += 1
        if s.decay == "coupled":
            torch._foreach_add_(g, p, alpha=s.weight_decay)
        else:
            torch._foreach_mul_(p, 1 - s.lr * s.weight_decay)
        torch._foreach_lerp_(m, g, 1 - BETA1)
        torch._foreach_mul_(v, BETA2)
        torch._foreach_addcmul_(v, g, g, 1 - BETA2)
        for param, moment, root in zip(p, m, torch._foreach_sqrt(v), strict=True):
            t = self.times[:rows].view(-1, *[1] * (param.dim() - 1))
            root.div_((1 - BETA2**t).sqrt()).add_(EPSILON)
            param.addcdiv_(moment * (-s.lr / (1 - BETA1**t)), root)


def _top(tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [t[:rows] for t in tensors]
