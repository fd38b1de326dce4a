"""What a client's texts are about, as a few points in the space of word vectors, and how alike two such sets are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 10  # of k-means; more moves points that no longer change who is alike


def documents(words: Tensor, tokens: Tensor) -> Tensor:
    """The mean word vector of every text, [n, length] → [n, d]; padding, which is id 0, does not count."""
    real = (tokens > 0).unsqueeze(2)
    return (words[tokens] * real).sum(1) / real.sum(1).clamp(min=1)


def centroids(points: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """At most `count` points that stand for all, by k-means from different points drawn on the CPU; where there are no
    more points than that, each stands for itself. Sums are products with a matrix, so that they have one order."""
    if len(points) <= count:
        return points
    centres = points[torch.randperm(len(points), generator=rng)[:count].to(points.device)]
    for _ in range(STEPS):
        member = F.one_hot(torch.cdist(points, centres).argmin(1), count).T.to(points.dtype)
        size = member.sum(1, keepdim=True)
        centres = torch.where(size > 0, member @ points / size.clamp(min=1), centres)
    return centres


def likeness(a: Tensor, b: Tensor, threshold: float) -> Tensor:
    """The mean of cos·1[cos > threshold] over all pairs of a point of one set and a point of the other."""
    cosine = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return (cosine * (cosine > threshold)).mean()
