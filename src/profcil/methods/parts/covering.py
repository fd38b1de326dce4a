"""Choosing few points that cover many: a point is covered if a chosen point is within a radius."""

from __future__ import annotations

import torch
from torch import Tensor

ENOUGH = 0.9  # share of covered points at which all count as uncovered again, so that more points can be chosen


def cover(points: Tensor, count: int, radius: float) -> Tensor:
    """Up to `count` different rows, in the order of choice. Each choice is the point with the most uncovered points
    within the radius. `radius` is in units of the mean distance between two different points."""
    n = len(points)
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    pairs = max(1, n * (n - 1))
    near = distance <= radius * distance.sum() / pairs
    uncovered = torch.ones(n, dtype=torch.bool, device=points.device)
    chosen: list[Tensor] = []
    for _ in range(min(count, n)):
        gain = (near & uncovered).sum(1)
        if chosen:
            gain = gain.index_fill(0, torch.stack(chosen), -1)
        best = gain.argmax()
        chosen.append(best)
        uncovered = uncovered & ~near[best]
        enough = uncovered.sum() <= (1 - ENOUGH) * n
        uncovered = uncovered | enough
    return torch.stack(chosen) if chosen else torch.arange(0, device=points.device)
