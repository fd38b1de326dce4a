"""How far is replay from the real data of its class, and does the distance go with later damage?

Pure functions over features of one shared evaluation space (paper, replay-real mismatch and downstream metrics): rows
are samples, `real` held-out ones and `replay` generated ones or draws from the memory. All sums are in double
precision. MMD and W1 have the units their kernel and space give them: compare methods in one space and, for MMD,
with one bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from profcil.errors import DataError
from profcil.randomness import generator

EXACT_UP_TO = 1000  # samples a side; the assignment's time grows with the cube


def median_bandwidth(*samples: Tensor) -> float:
    """The median rule: sigma is the median distance between different points of the pooled samples.

    Of an even number of distances it is the lower middle one. Coinciding points are left out, so that collapsed
    replay does not send sigma to zero; where all coincide, sigma is 1 and does not matter.
    """
    pooled = torch.cat([s.detach().double().cpu() for s in samples])
    distances = torch.nn.functional.pdist(pooled)
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0


def mmd2(real: Tensor, replay: Tensor, bandwidth: float | None = None) -> float:
    """The paper's unbiased MMD^2 with k(a, b) = exp(-|a - b|^2 / (2 sigma^2)); slightly below 0 when nothing differs.

    Without a bandwidth, sigma is the median rule over both samples; `median_bandwidth(real)` is one for all methods.
    """
    real, replay = _pair(real, replay, least=2)
    sigma = median_bandwidth(real, replay) if bandwidth is None else bandwidth
    if not 0 < sigma < float("inf"):
        raise DataError(f"bandwidth is {sigma}, allowed is a number above 0; leave it out for the median rule")
    return _within(real, sigma) + _within(replay, sigma) - 2 * float(_kernel(real, replay, sigma).mean())


def _kernel(a: Tensor, b: Tensor, sigma: float) -> Tensor:
    return torch.exp(-(_distances(a, b) ** 2) / (2 * sigma**2))


def _within(a: Tensor, sigma: float) -> float:
    """The mean kernel over i != i': the diagonal, which is 1 everywhere, would bias it upwards."""
    n = len(a)
    return float((_kernel(a, a, sigma).sum() - n) / (n * (n - 1)))


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean, without the matrix-product shortcut, which loses the small ones."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def w1(real: Tensor, replay: Tensor) -> float:
    """The exact empirical W_1 with Euclidean cost: for equal sizes, optimal transport is an optimal assignment."""
    from scipy.optimize import linear_sum_assignment

    real, replay = _pair(real, replay)
    if len(real) != len(replay):
        raise DataError(
            f"exact W1 was given {len(real)} real and {len(replay)} replay samples, allowed are equal numbers; "
            "draw as many of each or use sliced_w1"
        )
    cost = _distances(real, replay).numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def sliced_w1(real: Tensor, replay: Tensor, seed: int, directions: int = 256) -> float:
    """Sliced W_1, for large or unequal samples: the exact 1-D W_1, averaged over random directions.

    Another number than W_1, and never above it: report it under its own name.
    """
    real, replay = _pair(real, replay)
    if directions < 1:
        raise DataError(f"directions is {directions}, allowed is at least 1; leave it out for 256")
    drawn = torch.from_numpy(generator(seed, "replay-gap", "directions").standard_normal((directions, real.shape[1])))
    lines = torch.nn.functional.normalize(drawn, dim=1).T
    return _w1_on_lines((real @ lines).sort(dim=0).values, (replay @ lines).sort(dim=0).values)


def _w1_on_lines(a: Tensor, b: Tensor) -> float:
    """The integral of |F^-1 - G^-1|, both constant between the levels i/N and j/M; counted in units of 1/(NM)."""
    n, m = len(a), len(b)
    levels = torch.unique(torch.cat([torch.arange(1, n + 1) * m, torch.arange(1, m + 1) * n]))
    widths = torch.diff(levels, prepend=levels.new_zeros(1)).double() / (n * m)
    gaps = (a[(levels - 1) // m] - b[(levels - 1) // n]).abs()
    return float((widths @ gaps).mean())


def cosine_distance(real: Tensor, replay: Tensor) -> float:
    """CosDist between the class means; 1 where a mean is zero and so has no direction."""
    real, replay = _pair(real, replay)
    return 1 - float(torch.nn.functional.cosine_similarity(real.mean(0), replay.mean(0), dim=0))


def replay_gap(real: Tensor, replay: Tensor, seed: int, bandwidth: float | None = None) -> dict[str, float]:
    """All mismatches of one class, and how they were taken; `w1` where exact is affordable, else `sliced_w1`."""
    sigma = median_bandwidth(*_pair(real, replay, least=2)) if bandwidth is None else bandwidth
    exact = len(real) == len(replay) <= EXACT_UP_TO
    distance = {"w1": w1(real, replay)} if exact else {"sliced_w1": sliced_w1(real, replay, seed)}
    gaps = {"mmd2": mmd2(real, replay, sigma), **distance, "cosine": cosine_distance(real, replay)}
    return {**gaps, "bandwidth": sigma, "real": len(real), "replay": len(replay)}


def downstream_drop(clean: Sequence[float], weak: Sequence[float], task: int) -> float:
    """Delta_down: the mean final accuracy on the tasks after the weak one (from 0), clean run less weak run."""
    if len(clean) != len(weak) or not 0 <= task < len(clean) - 1:
        raise DataError(
            f"task {task} was given with {len(clean)} clean and {len(weak)} weak accuracies, allowed is one accuracy "
            "per task in both and a task before the last; choose an earlier task of two runs of one plan"
        )
    return float(np.mean(clean[task + 1 :]) - np.mean(weak[task + 1 :]))


class Correlation(NamedTuple):
    """Spearman's rho and its bootstrap interval."""

    rho: float
    low: float
    high: float


def rank_correlation(
    x: Sequence[float], y: Sequence[float], seed: int, level: float = 0.95, draws: int = 2000
) -> Correlation:
    """Spearman's rho with a percentile bootstrap interval over the pairs (runs), ties given mean ranks.

    A resample in which x or y is constant has no correlation and is left out. Pairs count as independent; runs that
    share a seed are not quite, so with few seeds the interval is too narrow.
    """
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    pairs = a.ndim == 1 and a.shape == b.shape and len(a) >= 3 and bool(np.isfinite([a, b]).all())
    if not pairs or min(np.ptp(a), np.ptp(b)) == 0:
        raise DataError(
            f"rank correlation was given values of shapes {a.shape} and {b.shape}, allowed are two lists of at least 3 "
            "finite numbers, neither constant; add runs or leave this trend out"
        )
    picks = generator(seed, "replay-gap", "bootstrap").integers(len(a), size=(draws, len(a)))
    tail = (1 - level) / 2
    low, high = np.nanquantile(_spearman(a[picks], b[picks]), [tail, 1 - tail])
    return Correlation(float(_spearman(a[None], b[None])[0]), float(low), float(high))


def _spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's correlation of the ranks, row by row; NaN for a constant row."""
    from scipy.stats import rankdata

    u, v = (r - r.mean(axis=1, keepdims=True) for r in (rankdata(a, axis=1), rankdata(b, axis=1)))
    with np.errstate(invalid="ignore"):
        return (u * v).sum(axis=1) / np.sqrt((u**2).sum(axis=1) * (v**2).sum(axis=1))


def _pair(real: Tensor, replay: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
    """Both samples in double precision on the CPU, or an error where they cannot be compared."""
    shapes = tuple(real.shape), tuple(replay.shape)
    fit = real.ndim == replay.ndim == 2 and real.shape[1] == replay.shape[1] > 0
    if not fit or min(len(real), len(replay)) < least:
        raise DataError(
            f"real and replay features have shapes {shapes[0]} and {shapes[1]}, allowed are [samples, width] of one "
            f"width with at least {least} samples each; embed both with the same extractor"
        )
    if not (real.isfinite().all() and replay.isfinite().all()):
        raise DataError("features contain NaN or infinity, allowed are finite numbers; check the run that made them")
    return real.detach().double().cpu(), replay.detach().double().cpu()
