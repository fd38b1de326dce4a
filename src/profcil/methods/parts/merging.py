"""Merging clients' updates by coordinates: whoever moved a coordinate much, and with the others, has more say there.

After PCB-merging (Du et al., NeurIPS 2024): within a client large moves count, exp(K·(Δ/max|Δ|)²), and between the
clients agreement counts, tanh(Δ_c·ΣΔ); of their product only the largest part has weight at all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def say(updates: Tensor, part: float) -> Tensor:
    """Every client's weight in [0, 1] on every coordinate, from updates [clients, coordinates]; the `part` of a
    client's coordinates with the largest product is above 0."""
    largest = updates.abs().amax(1, keepdim=True).clamp(min=torch.finfo(updates.dtype).tiny)
    within = (len(updates) * (updates / largest).square()).exp()
    product = within * (updates * updates.sum(0)).tanh()
    most = max(1, int(part * updates.shape[1]))
    floor = product.topk(min(most + 1, updates.shape[1]), dim=1).values[:, -1:]
    above = (product - floor).clamp(min=0)
    return above / above.amax(1, keepdim=True).clamp(min=torch.finfo(updates.dtype).tiny)


def merged_step(updates: Tensor, share: Tensor, part: float, rest: str = "average") -> Tensor:
    """The step that the model takes: on each coordinate a mean of the updates, by say and share of the examples. The
    weights add up to one, so equal updates are taken as they are. Coordinates on which nobody has a say are averaged
    by share alone, or stand still."""
    weight = say(updates, part) * share[:, None]
    total = weight.sum(0)
    chosen = (weight * updates).sum(0) / torch.where(total > 0, total, 1)
    others = (share[:, None] * updates).sum(0) if rest == "average" else torch.zeros_like(chosen)
    return torch.where(total > 0, chosen, others)
