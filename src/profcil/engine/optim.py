"""SGD and Adam as in-place updates of tensor lists, with no host synchronisation.

For one client torch's fused kernels do the work. A stack of clients needs more than torch's optimisers offer: clients
that have finished their epoch stand still, so each row has taken its own number of steps; and each client is clipped
by its own gradient norm.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    @torch.no_grad()
    def step(
        self,
        grads: Sequence[Tensor],
        rows: int | None = None,
        *,
        excess: Tensor | None = None,
        still: Tensor | None = None,
    ) -> None:
        """One update from these gradients, which may be overwritten; of the first `rows` clients of a stack. Numbers on
        the device: gradients are divided by `excess`, and where `still` is 1, nothing changes."""
        self.time += 1
        if rows is None:
            self._fused([g.contiguous() for g in grads], excess, still)  # kernels read memory in order, without strides
        elif self.adam:
            self._adam_rows(list(grads), rows)
        else:
            self._sgd_rows(list(grads), rows)

    def reset(self) -> None:
        """As at the start of a phase, on the same tensors."""
        torch._foreach_zero_([*self.first, *self.second, *self.steps, self.times])
        self.time = 0

    def _fused(self, grads: list[Tensor], excess: Tensor | None, still: Tensor | None) -> None:
        s, p, more = self.s, self.parameters, {"grad_scale": excess, "found_inf": still}
        if not self.adam:
            torch._fused_sgd_(
                p, grads, self.first if s.momentum else [], weight_decay=s.weight_decay, momentum=s.momentum, lr=s.lr,
                dampening=0.0, nesterov=False, maximize=False, is_first_step=False, **more,
            )  # fmt: skip
            return
        torch._foreach_add_(self.steps, 1)
        if still is not None:
            torch._foreach_sub_(self.steps, [still] * len(self.steps))
        rule = torch._fused_adam_ if s.decay == "coupled" else torch._fused_adamw_
        rule(
            p, grads, self.first, self.second, [], self.steps, lr=s.lr, beta1=BETA1, beta2=BETA2,
            weight_decay=s.weight_decay, eps=EPSILON, amsgrad=False, maximize=False, **more,
        )  # fmt: skip

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
