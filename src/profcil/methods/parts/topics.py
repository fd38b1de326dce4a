"""The topic of a client's texts: a few centroids in the space of word vectors, and the similarity of two such sets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

STEPS = 10  # of k-means; further steps do not change which tasks are similar


def document_vectors(words: Tensor, tokens: Tensor) -> Tensor:
    """The mean word vector of every text, [n, length] → [n, d], without padding, which has id 0."""
    is_word = (tokens > 0).unsqueeze(2)
    total = (words[tokens] * is_word).sum(1)
    length = is_word.sum(1).clamp(min=1)
    return total / length


def centroids(points: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """At most `count` centroids by k-means, which starts from points drawn on the CPU; all points if there are no more
    than that. Sums are matrix products, so that their order is fixed."""
    if len(points) <= count:
        return points
    order = torch.randperm(len(points), generator=rng)
    centres = points[order[:count].to(points.device)]
    for _ in range(STEPS):
        nearest = torch.cdist(points, centres).argmin(1)
        member = F.one_hot(nearest, count).T.to(points.dtype)
        size = member.sum(1, keepdim=True)
        mean = member @ points / size.clamp(min=1)
        centres = torch.where(size > 0, mean, centres)
    return centres


def similarity(a: Tensor, b: Tensor, threshold: float) -> Tensor:
    """The mean of cos·1[cos > threshold] over all pairs of a point of `a` and a point of `b`."""
    a = F.normalize(a, dim=1)
    b = F.normalize(b, dim=1)
    cosine = a @ b.T
    return (cosine * (cosine > threshold)).mean()
