"""Class centroids in a latent space: placed so that they keep their distance, and asked which is nearest.

Centroids interact by the Lennard-Jones potential V(r) = 4ε[(σ/r)¹² − (σ/r)⁶]: too near they repel, further off they
attract, and two are at rest at r = 2^(1/6) σ. Where the space has enough dimensions, all can be at rest with all.
ε only scales V; the path taken here does not depend on it, so it is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from profcil.engine.payload import Block
from profcil.memory.bank import Moments, moments_of_rows, pool
from profcil.tensors import to_device

REST = 2 ** (1 / 6)  # the distance of least potential, in σ
STIFF = 72 / REST**2  # V'' there, in 1/σ²
NEAREST = 0.5  # σ: below this distance the force grows no more, it is beyond any step's limit anyway
LIMIT = 0.05  # σ: the longest move in one step
STEPS = 3000
STILL = 1e-6  # σ: shorter moves end the descent
APART = 1e-3  # σ: by this much starting points are shaken, since equal ones would never part


def nowhere(like: Tensor) -> Block:
    """No centroids yet, of codes like this one; on its device."""
    return Block("prototype", {"mean": like.new_zeros(0, len(like))})


def mean_codes(z: Tensor, y: Tensor) -> Block:
    """What a client says of its classes: the mean code and the count of each. The labels are best on the host."""
    labels, rank = torch.unique(y, return_inverse=True)
    found = moments_of_rows(z, to_device(rank, z.device), labels.tolist(), radius=True)
    return Block("prototype", {"mean": found.mean, "count": found.count}, found.labels)


def pooled(told: Sequence[Block]) -> Block:
    """The mean code of every class that was told of, weighted by counts."""
    parts = [Moments(b.labels, b.tensors["mean"], b.tensors["mean"][:, :1], b.tensors["count"]) for b in told]
    found = pool(parts)  # second moments do not travel here, so any will do
    return Block("prototype", {"mean": found.mean}, found.labels)


def potential(points: Tensor, sigma: float) -> Tensor:
    """V summed over all pairs."""
    six = (sigma / torch.nn.functional.pdist(points.double())) ** 6
    return (4 * (six**2 - six)).sum()


def slopes(new: Tensor, points: Tensor, sigma: float) -> Tensor:
    """∂V/∂p for the first points, which are `new`, against all others; lengths are in σ."""
    r = torch.cdist(new, points, compute_mode="donot_use_mm_for_euclid_dist") / sigma
    near = r.clamp(min=NEAREST)
    pull = 4 * (6 * near**-7 - 12 * near**-13) / r.clamp(min=1e-12)  # V'(r)/r; nothing between a point and itself
    pull.fill_diagonal_(0.0)
    return (pull.sum(1, keepdim=True) * new - pull @ points) / sigma


def descend(new: Tensor, old: Tensor, sigma: float, rng: torch.Generator) -> Tensor:
    """Where new centroids come to rest among each other and the old ones, which do not move.

    The step is 1/(V'' n): at rest, n points that all move make the potential n times as stiff as one that moves."""
    shake = torch.randn(new.shape, generator=rng, dtype=torch.float64).to(new.device)
    points, rest = new.double() + APART * sigma * shake, old.double()
    rate = 1 / (STIFF * max(1, len(new) + len(old)))
    for _ in range(STEPS):
        move = rate * slopes(points, torch.cat([points, rest]), sigma)
        length = move.norm(dim=1, keepdim=True)
        points = points - sigma * move * (LIMIT / length.clamp(min=LIMIT))
        if float(length.max()) < STILL:
            break
    return points.to(new.dtype)


def place(bank: Block, fresh: Block, sigma: float, rng: torch.Generator) -> Block:
    """The bank with centroids for the classes of `fresh`, starting from their means; the others stay to the bit."""
    old, new = bank.tensors["mean"], fresh.tensors["mean"]
    rows = torch.cat([old, descend(new, old, sigma, rng)])
    labels = (*bank.labels, *fresh.labels)
    order = sorted(range(len(labels)), key=labels.__getitem__)
    return Block("prototype", {"mean": rows[order]}, tuple(labels[i] for i in order))


def around(centre: Tensor, pull: float, rng: torch.Generator) -> Tensor:
    """One draw around each row with the spread of a trained class."""
    noise = torch.randn(centre.shape, generator=rng, device=rng.device)
    return centre + (1 + 2 * pull) ** -0.5 * to_device(noise, centre.device)


def closeness(z: Tensor, bank: Block, classes: int) -> Tensor:
    """−‖z − p_y‖² for every class id; one without a centroid is never the nearest."""
    scores = z.new_full((len(z), classes), torch.finfo(z.dtype).min)
    if bank.labels:
        scores[:, list(bank.labels)] = -torch.cdist(z, bank.tensors["mean"]).square()
    return scores


def table(bank: Block, classes: int) -> Tensor:
    """One row a class id, zero where there is no centroid: what a loss can look labels up in."""
    mean = bank.tensors["mean"]
    index = to_device(torch.tensor(bank.labels, dtype=torch.long), mean.device)
    return mean.new_zeros(classes, mean.shape[1]).index_copy(0, index, mean)
