"""Rules that combine or select vectors so that a minority of false ones does little harm.

The functions are pure: they take stacked tensors [n, ...], one entry for each client, and know of nothing else. All are
symmetric in the clients, and equal vectors stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

TRIMMED = 0.2  # the share that a trimmed mean leaves out at each end, and the share of malicious clients in Krum
FEWEST = 3  # with fewer vectors there is no majority
WEISZFELD_STEPS = 500

Combine = Callable[[Tensor], Tensor]  # [n, ...] → [...]


def median(stack: Tensor) -> Tensor:
    """The median of each coordinate; of an even number the mean of the middle two."""
    ordered = stack.sort(0).values
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed_mean(stack: Tensor) -> Tensor:
    """The mean of each coordinate without the largest and the smallest values, a fifth at each end, at least one."""
    n = len(stack)
    cut = max(1, int(TRIMMED * n)) if n >= FEWEST else 0
    return stack.sort(0).values[cut : n - cut].mean(0)


def geometric_median(stack: Tensor) -> Tensor:
    """The point with the smallest sum of distances to all vectors."""
    vectors = stack.flatten(1).double()
    apart = vectors - median(vectors)  # far from the origin, inner products would lose digits
    return weighted(stack, geometric_shares(apart @ apart.T))


def geometric_shares(products: Tensor) -> Tensor:
    """The share of each vector in the geometric median, by Weiszfeld's algorithm on their inner products [n, n]."""
    squares = products.diagonal()
    least = 1e-12 * median(squares).clamp(min=1e-30)
    shares = torch.full_like(squares, 1 / len(squares))
    for _ in range(WEISZFELD_STEPS):
        to_all = products @ shares
        apart = (squares - 2 * to_all + shares @ to_all).clamp(min=least).sqrt()
        earlier = shares
        shares = (1 / apart) / (1 / apart).sum()
        if torch.allclose(shares, earlier, rtol=0, atol=1e-12):
            break
    return shares


def weighted(stack: Tensor, shares: Tensor) -> Tensor:
    """The sum of vectors times their shares, in float64; of the vectors' type."""
    together: Tensor = torch.tensordot(shares.to(stack.device), stack.double(), 1)
    return together.to(stack.dtype)


def shrinkage(distances: Tensor, radius: float) -> Tensor:
    """The factor of each update that brings it within a radius: 1 for those inside."""
    return (radius / distances.clamp(min=1e-30)).clamp(max=1.0)


def krum_choice(vectors: Tensor) -> list[int]:
    """Multi-Krum (Blanchard et al., NeurIPS 2017): the vectors whose nearest neighbours are near, in ascending order.

    With f malicious clients expected among n, the score of a vector is the sum of the squared distances to its
    n − f − 2 nearest ones. The n − f with the lowest scores are chosen.
    """
    n = len(vectors)
    if n < FEWEST:
        return list(range(n))
    malicious = max(1, int(TRIMMED * n))
    neighbours = max(1, n - malicious - 2)
    squared = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").square()
    squared.fill_diagonal_(torch.inf)
    scores = squared.topk(neighbours, largest=False).values.sum(1)
    chosen = scores.argsort(stable=True)[: n - malicious]
    return sorted(chosen.tolist())


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The distance between two sets of tensors, over the names that both have, in float64."""
    common = one.keys() & other.keys()
    squares = [float((one[name].double() - other[name].double()).square().sum()) for name in sorted(common)]
    return math.sqrt(sum(squares))


COMBINED: dict[str, Combine] = {"median": median, "trimmed": trimmed_mean, "geometric": geometric_median}
