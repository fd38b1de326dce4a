"""Naive Bayes from sums of non-negative features, which may have Gaussian noise.

With S_y the sum of the features of class y over its n_y examples, feature j has the log-rate log(S_yj + a). The weight
of a feature is its log-rate less that of a class with the rates of all classes together.
"""

from __future__ import annotations

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

NODES = 33  # of the Gauss-Hermite quadrature over the noise
CHUNK = 256  # examples at a time: wide features in float64 take much memory


def class_sums(features: Tensor, y: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The classes of some examples, and count and sum of each, the sums in float64."""
    labels, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    rows = torch.arange(len(labels), device=y.device)
    one_hot = (rows[:, None] == row).double()
    sums = torch.zeros(len(labels), features.shape[1], dtype=torch.float64, device=y.device)
    for members, part in zip(one_hot.split(CHUNK, 1), features.split(CHUNK), strict=True):
        sums += members @ part.double()
    return tuple(labels.tolist()), count, sums


def log_rates(count: Tensor, sums: Tensor, variance: Tensor, smoothing: float) -> Tensor:
    """The weights of all classes, [classes, features], in float64.

    Classes are scaled to one size, so that a class with more examples is not preferred. `variance` is that of the
    noise on each number of a class's sums. Noise moves the logarithm of a small sum upwards, and more so for a class
    with much noise. So the rate of all classes is compared under the same noise.
    """
    count = count.double().clamp(min=1.0)
    size = count.mean()
    scale = size / count
    deviation = variance.double().sqrt() * scale
    least = smoothing + deviation.mean()
    observed = (scale[:, None] * sums.double()).clamp(min=0.0)
    pooled = size * sums.double().sum(0) / count.sum()
    return (observed + least).log() - expected_log(pooled.clamp(min=0.0), deviation, least)


def expected_log(rate: Tensor, deviation: Tensor, least: Tensor) -> Tensor:
    """E log(max(rate + deviation · ε, 0) + least) over standard normal ε, [classes, features]."""
    if not bool(deviation.any()):
        return (rate + least).log().expand(len(deviation), -1)
    nodes, weights = hermegauss(NODES)
    total = torch.zeros(len(deviation), len(rate), dtype=torch.float64, device=rate.device)
    for node, weight in zip(nodes.tolist(), (weights / weights.sum()).tolist(), strict=True):
        noised = (rate + node * deviation[:, None]).clamp(min=0.0)
        total += weight * (noised + least).log()
    return total
