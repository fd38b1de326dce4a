"""Choosing few points that cover many: whoever is near a chosen point counts as represented by it."""

from __future__ import annotations

import torch
from torch import Tensor

ENOUGH = 0.9  # of the points covered; then the covering begins anew, so that more points may be chosen


def cover(points: Tensor, count: int, radius: float) -> Tensor:
    """Up to `count` different rows, in the order of choice: each time the one with most uncovered points around it.
    `radius` is in mean distances between two different points."""
    n = len(points)
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    near = distance <= radius * distance.sum() / max(1, n * (n - 1))
    open_, free = torch.ones(n, dtype=torch.bool, device=points.device), torch.arange(n, device=points.device)
    chosen: list[Tensor] = []
    for _ in range(min(count, n)):
        gain = (near & open_).sum(1)
        best = gain.index_fill(0, torch.stack(chosen), -1).argmax() if chosen else gain.argmax()
        chosen.append(best)
        open_ = open_ & ~near[best]
        open_ = open_ | (open_.sum() <= (1 - ENOUGH) * n)
    return torch.stack(chosen) if chosen else free[:0]
