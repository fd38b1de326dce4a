"""Class centroids in a latent space: their placement, and classification by the nearest one.

Centroids interact by the Lennard-Jones potential V(r) = 4ε[(σ/r)¹² − (σ/r)⁶]. They repel at short distances and
attract at longer ones; two are in equilibrium at r = 2^(1/6) σ. With enough dimensions all pairs can be in equilibrium.
ε only scales V, and the descent used here does not depend on it, so it is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.engine.channel import Block
from profcil.memory.bank import Moments, moments_of_rows, pool
from profcil.model.layers import distances_between

EQUILIBRIUM = 2 ** (1 / 6)  # the distance of least potential, in σ
STIFFNESS = 72 / EQUILIBRIUM**2  # V'' at that distance, in 1/σ²
SHORTEST = 0.5  # σ: below this distance the force is constant; it exceeds the limit of a step anyway
LONGEST_MOVE = 0.05  # σ: the longest move in one step
STEPS = 3000
TOLERANCE = 1e-6  # σ: shorter moves end the descent
JITTER = 1e-3  # σ: noise on the starting points, since equal points would never separate


def no_centroids(like: Tensor) -> Block:
    """An empty set of centroids for codes of the length of `like`, on its device."""
    mean = like.new_zeros(0, len(like))
    return Block("prototype", {"mean": mean})


def mean_codes(z: Tensor, y: Tensor) -> Block:
    """What a client sends about its classes: the mean code and the count of each."""
    labels, rank = torch.unique(y, return_inverse=True)
    rank = rank.to(z.device)
    moments = moments_of_rows(z, rank, labels.tolist(), radius=True)
    tensors = {"mean": moments.mean, "count": moments.count}
    return Block("prototype", tensors, moments.labels)


def pool_means(reports: Sequence[Block]) -> Block:
    """The mean code of every reported class, weighted by counts."""
    # Second moments are not sent and not used here; `pool` gets the means in their place.
    parts = []
    for report in reports:
        mean = report.tensors["mean"]
        count = report.tensors["count"]
        parts.append(Moments(report.labels, mean, mean[:, :1], count))
    pooled = pool(parts)
    return Block("prototype", {"mean": pooled.mean}, pooled.labels)


def potential_gradient(new: Tensor, points: Tensor, sigma: float) -> Tensor:
    """∂V/∂p of the points `new` against all `points`, of which they are the first rows; lengths are in σ."""
    r = torch.cdist(new, points, compute_mode="donot_use_mm_for_euclid_dist") / sigma
    bounded = r.clamp(min=SHORTEST)
    derivative = 4 * (6 * bounded**-7 - 12 * bounded**-13)  # V'(r)
    weight = derivative / r.clamp(min=1e-12)
    weight.fill_diagonal_(0.0)  # no force between a point and itself
    total = weight.sum(1, keepdim=True)
    return (total * new - weight @ points) / sigma


def descend(new: Tensor, old: Tensor, sigma: float, rng: torch.Generator) -> Tensor:
    """The equilibrium positions of new centroids among each other and the old ones, which do not move.

    The step size is 1/(V'' n): near equilibrium, n moving points have a potential n times as stiff as a single one."""
    noise = torch.randn(new.shape, generator=rng, dtype=torch.float64)
    points = new.double() + JITTER * sigma * noise.to(new.device)
    fixed = old.double()
    number = max(1, len(new) + len(old))
    rate = 1 / (STIFFNESS * number)
    for _ in range(STEPS):
        everything = torch.cat([points, fixed])
        move = rate * potential_gradient(points, everything, sigma)
        length = move.norm(dim=1, keepdim=True)
        shortened = LONGEST_MOVE / length.clamp(min=LONGEST_MOVE)
        points = points - sigma * move * shortened
        if float(length.max()) < TOLERANCE:
            break
    return points.to(new.dtype)


def place(bank: Block, fresh: Block, sigma: float, rng: torch.Generator) -> Block:
    """The bank with centroids for the classes of `fresh`, which start from their means. Old centroids do not change by
    a bit."""
    old = bank.tensors["mean"]
    new = fresh.tensors["mean"]
    placed = descend(new, old, sigma, rng)
    rows = torch.cat([old, placed])
    labels = (*bank.labels, *fresh.labels)
    order = sorted(range(len(labels)), key=labels.__getitem__)
    ascending = tuple(labels[i] for i in order)
    return Block("prototype", {"mean": rows[order]}, ascending)


def sample_around(centres: Tensor, pull: float, rng: torch.Generator) -> Tensor:
    """One Gaussian sample around each row, with the spread of a trained class."""
    noise = torch.randn(centres.shape, generator=rng, device=rng.device)
    spread: float = (1 + 2 * pull) ** -0.5
    return centres + spread * noise.to(centres.device)


def negative_distances(z: Tensor, bank: Block, classes: int) -> Tensor:
    """−‖z − p_y‖² for every class id; the lowest number for a class without a centroid."""
    lowest = torch.finfo(z.dtype).min
    scores = z.new_full((z.shape[0], classes), lowest)
    if bank.labels:
        distances = distances_between(z, bank.tensors["mean"])
        scores[:, list(bank.labels)] = -distances.square()
    return scores


def table(bank: Block, classes: int) -> Tensor:
    """One row per class id, zero for a class without a centroid: a loss indexes it by labels."""
    mean = bank.tensors["mean"]
    index = torch.tensor(bank.labels, dtype=torch.long, device=mean.device)
    zeros = mean.new_zeros(classes, mean.shape[1])
    return zeros.index_copy(0, index, mean)
