"""Distances between the replay and the real data of a class, and their correlation with later accuracy drops.

Pure functions of features in one shared evaluation space (paper, replay-real mismatch and downstream metrics). Rows are
samples: `real` are held-out samples, `replay` are generated samples or draws from a memory. All computations are in
double precision. MMD and W1 depend on the space, and MMD also on the bandwidth: compare methods in one space with one
bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from profcil.errors import DataError
from profcil.randomness import generator

EXACT_UP_TO = 1000  # samples per side; the time of the assignment grows with the cube


def median_bandwidth(*samples: Tensor) -> float:
    """The median rule: sigma is the median distance between distinct points of the pooled samples.

    For an even number of distances it is the lower of the two middle ones. Coinciding points are left out, so that
    collapsed replay does not make sigma zero. If all points coincide, sigma is 1 and has no effect.
    """
    pooled = torch.cat([s.detach().double().cpu() for s in samples])
    distances = torch.nn.functional.pdist(pooled)
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0


def mmd2(real: Tensor, replay: Tensor, bandwidth: float | None = None) -> float:
    """The paper's unbiased MMD^2 with k(a, b) = exp(-|a - b|^2 / (2 sigma^2)); it may be slightly negative.

    Without a bandwidth, sigma is the median rule over both samples. To compare methods, use `median_bandwidth(real)`.
    """
    real, replay = _checked(real, replay, least=2)
    sigma = median_bandwidth(real, replay) if bandwidth is None else bandwidth
    if not 0 < sigma < float("inf"):
        raise DataError(f"bandwidth is {sigma}, allowed is a number above 0; leave it out for the median rule")
    between = float(_kernel(real, replay, sigma).mean())
    return _within(real, sigma) + _within(replay, sigma) - 2 * between


def _kernel(a: Tensor, b: Tensor, sigma: float) -> Tensor:
    return torch.exp(-(_distances(a, b) ** 2) / (2 * sigma**2))


def _within(a: Tensor, sigma: float) -> float:
    """The mean kernel over pairs i != j. The diagonal is 1 everywhere and would bias the mean upwards."""
    n = len(a)
    return float((_kernel(a, a, sigma).sum() - n) / (n * (n - 1)))


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distances, without the matrix-product shortcut, which is inaccurate for small distances."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def w1(real: Tensor, replay: Tensor) -> float:
    """The exact empirical W_1 with Euclidean cost: for equal sizes, optimal transport is an optimal assignment."""
    from scipy.optimize import linear_sum_assignment

    real, replay = _checked(real, replay)
    if len(real) != len(replay):
        raise DataError(
            f"exact W1 was given {len(real)} real and {len(replay)} replay samples, allowed are equal numbers; "
            "draw equal numbers or use sliced_w1"
        )
    cost = _distances(real, replay).numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def sliced_w1(real: Tensor, replay: Tensor, seed: int, directions: int = 256) -> float:
    """Sliced W_1, for large or unequal samples: the exact 1-D W_1, averaged over random directions.

    It differs from W_1 and never exceeds it, so it must be reported under its own name.
    """
    real, replay = _checked(real, replay)
    if directions < 1:
        raise DataError(f"directions is {directions}, allowed is at least 1; leave it out for 256")
    random = generator(seed, "replay-gap", "directions")
    drawn = torch.from_numpy(random.standard_normal((directions, real.shape[1])))
    lines = torch.nn.functional.normalize(drawn, dim=1).T
    sorted_real = (real @ lines).sort(dim=0).values
    sorted_replay = (replay @ lines).sort(dim=0).values
    return _w1_on_lines(sorted_real, sorted_replay)


def _w1_on_lines(a: Tensor, b: Tensor) -> float:
    """The mean 1-D W_1 over columns of sorted samples: the integral of |F^-1 - G^-1|.

    Both are constant between the levels i/N and j/M, which are counted here in units of 1/(NM).
    """
    n = len(a)
    m = len(b)
    levels_of_a = torch.arange(1, n + 1) * m
    levels_of_b = torch.arange(1, m + 1) * n
    levels = torch.unique(torch.cat([levels_of_a, levels_of_b]))
    widths = torch.diff(levels, prepend=levels.new_zeros(1)).double() / (n * m)
    quantiles_of_a = a[(levels - 1) // m]
    quantiles_of_b = b[(levels - 1) // n]
    gaps = (quantiles_of_a - quantiles_of_b).abs()
    return float((widths @ gaps).mean())


def cosine_distance(real: Tensor, replay: Tensor) -> float:
    """CosDist between the class means; 1 if a mean is zero and so has no direction."""
    real, replay = _checked(real, replay)
    return 1 - float(torch.nn.functional.cosine_similarity(real.mean(0), replay.mean(0), dim=0))


def replay_gap(real: Tensor, replay: Tensor, seed: int, bandwidth: float | None = None) -> dict[str, float]:
    """All distances of one class, with bandwidth and sample counts; `w1` if it is affordable, else `sliced_w1`."""
    if bandwidth is None:
        bandwidth = median_bandwidth(*_checked(real, replay, least=2))
    gaps = {"mmd2": mmd2(real, replay, bandwidth)}
    if len(real) == len(replay) <= EXACT_UP_TO:
        gaps["w1"] = w1(real, replay)
    else:
        gaps["sliced_w1"] = sliced_w1(real, replay, seed)
    gaps["cosine"] = cosine_distance(real, replay)
    return {**gaps, "bandwidth": bandwidth, "real": len(real), "replay": len(replay)}


def downstream_drop(clean: Sequence[float], weak: Sequence[float], task: int) -> float:
    """Delta_down: the mean final accuracy on the tasks after the weak one, clean run minus weak run.

    `task` is counted from 0.
    """
    if len(clean) != len(weak) or not 0 <= task < len(clean) - 1:
        raise DataError(
            f"task {task} (counted from 0) was given with {len(clean)} clean and {len(weak)} weak accuracies, allowed "
            "is one accuracy per task in both runs and a task before the last; "
            "choose an earlier task, and two runs of one plan"
        )
    clean_after = np.mean(clean[task + 1 :])
    weak_after = np.mean(weak[task + 1 :])
    return float(clean_after - weak_after)


class Correlation(NamedTuple):
    """Spearman's rho and its bootstrap interval."""

    rho: float
    low: float
    high: float


def rank_correlation(
    x: Sequence[float], y: Sequence[float], seed: int, level: float = 0.95, draws: int = 2000
) -> Correlation:
    """Spearman's rho with a percentile bootstrap interval over the pairs (runs). Ties have mean ranks.

    A resample in which x or y is constant has no correlation and is left out. Pairs are treated as independent. Runs
    that share a seed are not quite independent, so with few seeds the interval is too narrow.
    """
    a = np.asarray(x, dtype=float)
    b = np.asarray(y, dtype=float)
    are_pairs = a.ndim == 1 and a.shape == b.shape and len(a) >= 3
    is_valid = are_pairs and bool(np.isfinite([a, b]).all())
    if not is_valid or min(np.ptp(a), np.ptp(b)) == 0:
        raise DataError(
            f"rank correlation was given values of shapes {a.shape} and {b.shape}, allowed are two lists of at least 3 "
            "finite numbers, neither constant; add runs or leave this trend out"
        )
    random = generator(seed, "replay-gap", "bootstrap")
    picks = random.integers(len(a), size=(draws, len(a)))
    resampled = _spearman(a[picks], b[picks])
    tail = (1 - level) / 2
    low, high = np.nanquantile(resampled, [tail, 1 - tail])
    rho = _spearman(a[None], b[None])[0]
    return Correlation(float(rho), float(low), float(high))


def _spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's correlation of the ranks of each row; NaN for a constant row."""
    from scipy.stats import rankdata

    u = rankdata(a, axis=1)
    v = rankdata(b, axis=1)
    u = u - u.mean(axis=1, keepdims=True)
    v = v - v.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        covariance = (u * v).sum(axis=1)
        variances = (u**2).sum(axis=1) * (v**2).sum(axis=1)
        return covariance / np.sqrt(variances)


def _checked(real: Tensor, replay: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
    """Both samples in double precision on the CPU. Samples that cannot be compared are a DataError."""
    have_one_width = real.ndim == replay.ndim == 2 and real.shape[1] == replay.shape[1] > 0
    if not have_one_width or min(len(real), len(replay)) < least:
        raise DataError(
            f"real and replay features have shapes {tuple(real.shape)} and {tuple(replay.shape)}, allowed are "
            f"[samples, width] of one width with at least {least} samples each; embed both with the same extractor"
        )
    if not (real.isfinite().all() and replay.isfinite().all()):
        raise DataError("features contain NaN or infinity, allowed are finite numbers; check the run that made them")
    return real.detach().double().cpu(), replay.detach().double().cpu()
