"""SGD and Adam as in-place updates of tensor lists by torch's fused kernels, without synchronising a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from profcil.config import TrainSettings

BETA1 = 0.9
BETA2 = 0.999
EPSILON = 1e-8


def clip_(grads: Sequence[Tensor], limit: float) -> None:
    """Scales gradients to a norm of at most `limit`; 0 = no limit."""
    if not limit:
        return
    if grads[0].device.type == "cpu":  # reading a value is cheap here, and a dot product is the fastest norm
        flat = [grad.reshape(-1) for grad in grads]
        norm = sum(float(torch.dot(grad, grad)) for grad in flat) ** 0.5
        if not norm + 1e-6 <= limit:  # also true if the norm is NaN
            torch._foreach_mul_(list(grads), limit / (norm + 1e-6))
        return
    norms = torch.stack(torch._foreach_norm(list(grads))).norm()
    torch._foreach_mul_(list(grads), (limit / (norms + 1e-6)).clamp(max=1.0))


class Rule(NamedTuple):
    """The kind of update and its coefficients."""

    kind: str  # sgd, adam or adamw
    lr: float
    decay: float
    momentum: float


class Moments(NamedTuple):
    """Moments of earlier gradients and the number of updates, for each tensor."""

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
    """One update by torch's fused kernels. Gradients are divided by `excess`. TorchScript can compile this function."""
    lr = rule.lr
    decay = rule.decay
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
    """The update rule of one phase, and its moments."""

    def __init__(self, settings: TrainSettings, parameters: Sequence[Tensor]) -> None:
        self.s = settings
        self.channels_last = [is_channels_last(p) for p in parameters]
        self.parameters = self.in_memory_order([p.detach() for p in parameters])
        self.time = 0  # updates so far
        adam = settings.optimiser == "adam"
        first = [torch.zeros_like(p) for p in self.parameters]
        second = [torch.zeros_like(p) for p in self.parameters] if adam else []
        steps = [torch.zeros((), device=p.device) for p in self.parameters]
        self.moments = Moments(first, second, steps)
        self.rule = Rule(rule_kind(settings), settings.lr, settings.weight_decay, settings.momentum)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], *, excess: Tensor | None = None) -> None:
        """One update from these gradients, which may be overwritten and are divided by `excess`."""
        self.time += 1
        dense = [g.contiguous() for g in self.in_memory_order(grads)]
        fused(self.parameters, dense, self.moments, self.rule, excess)

    def in_memory_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views with the axes in the order in which the parameters lie in memory. Fused kernels need tensors without
        gaps, and channels-last weights have none only in that order."""
        pairs = zip(tensors, self.channels_last, strict=True)
        return [t.permute(0, 2, 3, 1) if last else t for t, last in pairs]

    def reset(self) -> None:
        """Sets moments and counts to zero, as at the start of a phase."""
        torch._foreach_zero_([*self.moments.first, *self.moments.second, *self.moments.steps])
        self.time = 0


def rule_kind(settings: TrainSettings) -> str:
    """The kind of update that the settings choose: sgd, adam or adamw."""
    if settings.optimiser != "adam":
        return "sgd"
    return "adam" if settings.decay == "coupled" else "adamw"


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a 4-d tensor lies in memory with its channels last, and not in plain order."""
    if tensor.dim() != 4 or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)
