"""Synaptic intelligence (Zenke et al., 2017): how much each parameter has contributed to lowering a loss.

The contribution is the path integral s_i = −∫ g_i dv_i, summed over optimiser steps with the actual parameter
differences. The shortcut −lr·g² would be correct for plain SGD only, not with momentum, Adam, clipping or a proximal
term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

Named = Mapping[str, Tensor]


def path_integral(
    parameters: Sequence[Tensor], losses: Iterable[Tensor], step: Callable[[list[Tensor]], None]
) -> tuple[Tensor, ...]:
    """Trains `parameters` on the losses, and returns the path integral of each, by the gradient of the losses alone.

    `losses` is a lazy iterable: each loss is computed under the parameters of its step. `step` updates the parameters
    in place and may overwrite the gradients that it is given.
    """
    path = tuple(torch.zeros_like(p, requires_grad=False) for p in parameters)
    for loss in losses:
        grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
        before = [p.detach().clone() for p in parameters]
        step([g.clone() for g in grads])
        for s, g, old, new in zip(path, grads, before, parameters, strict=True):
            s.sub_(g * (new.detach() - old))
    return path


def importance(path: Sequence[Tensor], start: Sequence[Tensor], end: Sequence[Tensor], xi: float) -> list[Tensor]:
    """Ω_i = max(s_i, 0) / ((v_i − w_i)² + ξ) for training from w to v."""
    omega = []
    for s, w, v in zip(path, start, end, strict=True):
        distance = (v - w).square()
        omega.append(s.relu() / (distance + xi))
    return omega


def penalty(parameters: Named, omega: Named, reference: Named) -> Tensor:
    """Σ_i Ω_i (w_i − w*_i)²."""
    sums = []
    for name, parameter in parameters.items():
        distance = (parameter - reference[name]).square()
        sums.append((omega[name] * distance).sum())
    return torch.stack(sums).sum()
