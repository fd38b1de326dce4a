"""Synaptic intelligence (Zenke et al., 2017): how much each parameter has contributed to lowering a loss.

The contribution is the path integral s_i = −∫ g_i dv_i, summed over steps with the parameter differences that really
happened: −lr·g² would be right for plain SGD only, not under momentum, Adam, clipping or a pull towards elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


def walk(
    parameters: Sequence[Tensor], losses: Iterable[Tensor], step: Callable[[list[Tensor]], None]
) -> tuple[Tensor, ...]:
    """Walks `parameters` down the losses and gives each one's path integral, of the losses' gradient alone.

    `losses` is drawn from lazily, one loss under the present parameters a step; `step` moves the parameters in place,
    given gradients that it may overwrite.
    """
    path = tuple(torch.zeros_like(p, requires_grad=False) for p in parameters)
    for loss in losses:
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        before = [p.detach().clone() for p in parameters]
        step([g.clone() for g in grads])
        for s, g, was, now in zip(path, grads, before, parameters, strict=True):
            s.sub_(g * (now.detach() - was))
    return path


def importance(path: Sequence[Tensor], start: Sequence[Tensor], end: Sequence[Tensor], xi: float) -> list[Tensor]:
    """Ω_i = max(s_i, 0) / ((v_i − w_i)² + ξ) for a walk from w to v."""
    return [s.relu() / ((v - w).square() + xi) for s, w, v in zip(path, start, end, strict=True)]


def penalty(parameters: Named, omega: Named, reference: Named) -> Tensor:
    """Σ_i Ω_i (w_i − w*_i)²."""
    return torch.stack([(omega[k] * (p - reference[k]).square()).sum() for k, p in parameters.items()]).sum()
