"""A sketch of the second-moment matrix that can be added, and the closed-form head from it.

The matrix G = Σ uuᵀ of d features is replaced by GΩ and the diagonal of G, for r directions Ω that all clients have in
common: d(r + 1) numbers in place of d(d + 1)/2. Both are sums over examples, so sketches of disjoint examples add up.
The class means are known in full. So the sketch of the covariance within classes, C = (G − Σ n μμᵀ) / n, follows
exactly, and C is approximated from below by a matrix of rank r (Nyström), with the diagonal that is missing added:

    C ≈ FFᵀ + D,   FFᵀ = CΩ (ΩᵀCΩ)⁻¹ (CΩ)ᵀ,   D = diag(C − FFᵀ) ≥ 0

It is C itself if r = d. The head is solved by the Woodbury identity: no d×d matrix is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from profcil.memory import linear, symmetric
from profcil.memory.linear import FLOOR, ROUNDING, Summary
from profcil.randomness import torch_generator

SEED = 0  # of the directions, which are the same in all runs


@dataclass(frozen=True)
class Sketch:
    """What is known of the second moments G of features."""

    product: Tensor  # [d, r], GΩ
    diagonal: Tensor  # [d], of G

    def __add__(self, other: Sketch) -> Sketch:
        return Sketch(self.product + other.product, self.diagonal + other.diagonal)


def directions(features: int, rank: int) -> Tensor:
    """Ω: as many random orthonormal columns as `rank` says, at most one for each feature. They follow from these two
    numbers. They are drawn on the CPU: the same on every device."""
    rng = torch_generator(SEED, "sketch", features)
    normal = torch.randn(features, min(rank, features), generator=rng, dtype=torch.float64)
    orthonormal: Tensor = torch.linalg.qr(normal).Q
    return orthonormal


def sketch_of(u: Tensor, rank: int) -> Sketch:
    """The sketch of some examples."""
    u = u.double()
    omega = directions(u.shape[1], rank).to(u.device)
    return Sketch(u.T @ (u @ omega), u.square().sum(0))


def within_classes(s: Summary, sketch: Sketch, omega: Tensor) -> Sketch:
    """The sketch of the covariance within classes."""
    weighted = s.count[:, None] * s.mean
    product = sketch.product - weighted.T @ (s.mean @ omega)
    return Sketch(product / s.count.sum(), linear.within_class_variance(s))


def low_rank(within: Sketch, omega: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    """F and the diagonal of D. Directions whose variance is below `floor`, which is rounding, are left out of F."""
    inner = omega.T @ within.product
    values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
    kept = values > floor
    factor = within.product @ (vectors[:, kept] / values[kept].sqrt())
    missing = within.diagonal - factor.square().sum(1)
    return factor, missing.clamp(min=0.0)


def lda(s: Summary, shrink: float, last: int = 0) -> tuple[Tensor, Tensor]:
    """The head of `linear.lda` from a sketch. Without one it is the nearest class mean."""
    if s.sketch is None:
        return nearest_means(s)
    total = s.count.sum()
    omega = directions(s.mean.shape[1], s.sketch.product.shape[1]).to(s.mean.device)
    within = within_classes(s, s.sketch, omega)
    if within.diagonal.mean() <= FLOOR * s.sketch.diagonal.mean() / total:
        return nearest_means(s)
    seen = (omega * s.sketch.product).sum() / total  # the mean square along all directions
    factor, missing = low_rank(within, omega, ROUNDING * seen)
    penalties = linear.penalties(within.diagonal, s.sketch.diagonal, total, shrink, last)
    return discriminants(s.mean, factor, missing + penalties)


def discriminants(mean: Tensor, factor: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    """w_y = (FFᵀ + D)⁻¹ μ_y and b_y = −½ w_yᵀμ_y."""
    scaled = factor / diagonal[:, None]
    inner = symmetric.add_to_diagonal(factor.T @ scaled, diagonal.new_ones(()))
    weight = mean / diagonal
    weight = weight - symmetric.solve(inner, factor.T @ weight.T).T @ scaled.T
    return weight, -0.5 * (weight * mean).sum(1)


def nearest_means(s: Summary) -> tuple[Tensor, Tensor]:
    """w_y = μ_y and b_y = −½ ‖μ_y‖²: the head without second moments. What noise alone adds to ‖μ_y‖² on average is
    taken off the bias."""
    bias = -0.5 * s.mean.square().sum(1)
    if s.sum_noise is not None:
        bias = bias + 0.5 * s.mean.shape[1] * s.sum_noise / s.count**2
    return s.mean, bias
