"""Neighbourhood-weighted memory transport (PRO-MAX): old means follow the drift of the real features near them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-12


def squared_distances(means: Tensor, features: Tensor) -> Tensor:
    """Squared distances between means and features in float64, [means, features]."""
    distances = torch.cdist(means.double(), features.double())
    return distances.square()


def median_bandwidth(distances: Tensor, factor: float) -> Tensor:
    """τ: a factor times the median distance between memory means and calibration features. `distances` are squared."""
    median = distances.sqrt().median()
    return factor * median.clamp(min=EPSILON)


def local_transport(
    means: Tensor, before: Tensor, after: Tensor, *, neighbours: int, factor: float = 1.0, tau: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Δ_y = Σ α_i δ_i / (Σ α_i + ε) over the K calibration features nearest to μ_y, and the confidence q_y = Σ α_i.

    α_i = exp(−d_i / 2τ²) with squared distances d_i before the update. Returns shifts [classes, d] and confidences
    [classes]. With τ = 0 the bandwidth is the median distance times `factor`.
    """
    distances = squared_distances(means, before)
    if tau:
        width = torch.as_tensor(tau, dtype=torch.float64, device=means.device)
    else:
        width = median_bandwidth(distances, factor)
    neighbours = min(neighbours, len(before))
    nearest, index = distances.topk(neighbours, largest=False)
    alpha = torch.exp(-nearest / (2 * width**2))
    change = after.double() - before.double()
    weighted = alpha[..., None] * change[index]
    confidence = alpha.sum(1)
    shift = weighted.sum(1) / (confidence[:, None] + EPSILON)
    return shift.float(), confidence.float()


def combine(shifts: Sequence[Tensor], confidences: Sequence[Tensor]) -> Tensor:
    """Δ^g_y = Σ_c q_{c,y} Δ_{c,y} / (Σ_c q_{c,y} + ε): clients without features near a mean hardly count."""
    q = torch.stack(list(confidences)).double()
    delta = torch.stack(list(shifts)).double()
    weighted = (q[..., None] * delta).sum(0)
    total = q.sum(0)[:, None]
    combined = weighted / (total + EPSILON)
    return combined.float()
