"""Merging client updates per coordinate: large updates that agree with the others have more weight.

After PCB-merging (Du et al., NeurIPS 2024). Within a client, large updates count more, exp(K·(Δ/max|Δ|)²). Between
clients, agreement counts, tanh(Δ_c·ΣΔ). Only the largest products of the two have a weight above 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_weights(updates: Tensor, part: float) -> Tensor:
    """The weight in [0, 1] of every client on every coordinate, from updates [clients, coordinates]. The `part` of a
    client's coordinates with the largest products has weights above 0."""
    smallest = torch.finfo(updates.dtype).tiny
    largest = updates.abs().amax(1, keepdim=True).clamp(min=smallest)
    within = (len(updates) * (updates / largest).square()).exp()
    between = (updates * updates.sum(0)).tanh()
    product = within * between
    coordinates = updates.shape[1]
    most = max(1, int(part * coordinates))
    count = min(most + 1, coordinates)
    largest_products = product.topk(count, dim=1).values
    floor = largest_products[:, -1:]
    above = (product - floor).clamp(min=0)
    highest = above.amax(1, keepdim=True)
    return above / highest.clamp(min=smallest)


def merged_step(updates: Tensor, share: Tensor, part: float, rest: str = "average") -> Tensor:
    """The update of the global model: on each coordinate a mean of the client updates, weighted by `merge_weights` and
    the share of the examples. The weights sum to one, so equal updates are applied unchanged. Coordinates on which all
    weights are 0 are averaged by share alone, or do not change."""
    weight = merge_weights(updates, part) * share[:, None]
    total = weight.sum(0)
    weighted = total > 0
    divisor = torch.where(weighted, total, 1)
    chosen = (weight * updates).sum(0) / divisor
    others = torch.zeros_like(chosen)
    if rest == "average":
        others = (share[:, None] * updates).sum(0)
    return torch.where(weighted, chosen, others)
