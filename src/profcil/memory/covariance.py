"""One within-class covariance matrix for all classes, pooled over clients.

A client measures the scatter of its features around its own class means. With these means and the pooled ones the
server gets the scatter around the pooled means: pooling is exact, as for the moments in `bank`. Matrices are sent and
stored as packed triangles (`linear.pack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.memory.bank import FLOOR, Moments
from profcil.memory.symmetric import add_to_diagonal, cholesky, packed_gram, symmetrise, unpack


@dataclass(frozen=True)
class Covariance:
    """The mean of (u − μ_y)(u − μ_y)ᵀ over some examples of any classes."""

    matrix: Tensor  # [d, d], float64
    count: int  # of the examples


def packed_scatter(features: Tensor, rank: Tensor, mean: Tensor) -> Tensor:
    """Σ (u − μ_y)(u − μ_y)ᵀ, packed. `rank` is the row of each feature's class in `mean`."""
    own_mean = mean.double()[rank]
    return packed_gram(features.double() - own_mean)


def pool(parts: Sequence[Moments], scatters: Sequence[Tensor], pooled: Moments) -> Covariance:
    """The covariance around the pooled means: Σ_c S_c + Σ_c Σ_y n_cy (μ_cy − μ_y)(μ_cy − μ_y)ᵀ, over all examples."""
    row_of = {label: row for row, label in enumerate(pooled.labels)}
    rows = []
    for part in parts:
        rows += [row_of[label] for label in part.labels]
    count = torch.cat([part.count for part in parts]).double()
    means = torch.cat([part.mean for part in parts]).double()
    apart = means - pooled.mean.double()[rows]
    stacked = torch.stack(list(scatters))
    scatter = unpack(stacked.sum(0, dtype=torch.float64))
    weighted = count[:, None] * apart
    total = int(count.sum())
    matrix = (scatter + apart.T @ weighted) / total
    return Covariance(matrix, total)


def blend(old: Covariance, fresh: Covariance) -> Covariance:
    """The count-weighted mean of two covariances."""
    total = old.count + fresh.count
    scatter = old.count * old.matrix + fresh.count * fresh.matrix
    return Covariance(scatter / total, total)


def carried(c: Covariance, shift: Tensor, residual: Tensor) -> Covariance:
    """The covariance after a linear drift: AᵀΣA with A = I + B, B without its row for the constant. The second moment
    of the residual is added, so that the spread of old classes grows as that of real features did."""
    zeros = c.matrix.new_zeros(c.matrix.shape)
    identity = add_to_diagonal(zeros, zeros.new_ones(()))
    image = identity + shift[:-1]
    matrix = image.T @ c.matrix @ image + residual
    return replace(c, matrix=symmetrise(matrix))


def factor(matrix: Tensor) -> Tensor:
    """L with LLᵀ = Σ + εI, lower triangular, in float32."""
    return cholesky(shrunk(matrix, 0.0)).float()


def shrunk(matrix: Tensor, share: float) -> Tensor:
    """Σ + (λ·mean variance + ε) I. ε is the floor of variances in `bank`, so that a matrix without any can be
    inverted."""
    mean_variance = matrix.diagonal().mean()
    return add_to_diagonal(matrix, share * mean_variance + FLOOR)
