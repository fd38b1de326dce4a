"""Distances between the replay and the real data of a class, and their correlation with later accuracy drops.

Pure functions of features in one shared evaluation space (paper, replay-real mismatch and downstream metrics). Rows are
samples: `real` are held-out samples, `replay` are generated samples or draws from a memory. All computations are in
double precision. MMD and W1 depend on the space, and MMD also on the bandwidth: compare methods in one space with one
bandwidth.
"""

from __future__ import annotations

import math
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
    in_double = [_as_double(s) for s in samples]
    pooled = torch.cat(in_double)
    distances = torch.nn.functional.pdist(pooled)
    distances = distances[distances > 0]
    return float(distances.median()) if len(distances) else 1.0


def mmd2(real: Tensor, replay: Tensor, bandwidth: float | None = None) -> float:
    """The paper's unbiased MMD^2 with k(a, b) = exp(-|a - b|^2 / (2 sigma^2)); it may be slightly negative.

    Without a bandwidth, sigma is the median rule over both samples. To compare methods, use `median_bandwidth(real)`.
    """
    real, replay = _checked(real, replay, least=2)
    sigma = median_bandwidth(real, replay) if bandwidth is None else bandwidth
    if not 0 < sigma < math.inf:
        raise DataError(f"bandwidth is {sigma}, allowed is a number above 0; leave it out for the median rule")
    between = _kernel(real, replay, sigma).mean()
    within = _within(real, sigma) + _within(replay, sigma)
    return within - 2 * float(between)


def _kernel(a: Tensor, b: Tensor, sigma: float) -> Tensor:
    squared = _distances(a, b) ** 2
    return torch.exp(-squared / (2 * sigma**2))


def _within(a: Tensor, sigma: float) -> float:
    """The mean kernel over pairs i != j. The diagonal is 1 everywhere and would bias the mean upwards."""
    n = len(a)
    pairs = n * (n - 1)
    off_diagonal = _kernel(a, a, sigma).sum() - n
    return float(off_diagonal / pairs)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean distances, without the matrix-product shortcut, which is inaccurate for small distances."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")


def w1(real: Tensor, replay: Tensor) -> float:
    """The exact empirical W_1 with Euclidean cost: for equal sizes, optimal transport is an optimal assignment."""
    from scipy.optimize import linear_sum_assignment

    real, replay = _checked(real, replay)
    n = len(real)
    m = len(replay)
    if n != m:
        raise DataError(
            f"exact W1 was given {n} real and {m} replay samples, allowed are equal numbers; "
            "draw equal numbers or use sliced_w1"
        )
    cost = _distances(real, replay).numpy()
    assigned = cost[linear_sum_assignment(cost)]
    return float(assigned.mean())


def sliced_w1(real: Tensor, replay: Tensor, seed: int, directions: int = 256) -> float:
    """Sliced W_1, for large or unequal samples: the exact 1-D W_1, averaged over random directions.

    It differs from W_1 and never exceeds it, so it must be reported under its own name.
    """
    real, replay = _checked(real, replay)
    if directions < 1:
        raise DataError(f"directions is {directions}, allowed is at least 1; leave it out for 256")
    random = generator(seed, "replay-gap", "directions")
    width = real.shape[1]
    drawn = random.standard_normal((directions, width))
    lines = torch.nn.functional.normalize(torch.from_numpy(drawn), dim=1).T
    projected_real = real @ lines
    projected_replay = replay @ lines
    return _w1_on_lines(projected_real.sort(dim=0).values, projected_replay.sort(dim=0).values)


def _w1_on_lines(a: Tensor, b: Tensor) -> float:
    """The mean 1-D W_1 over columns of sorted samples: the integral of |F^-1 - G^-1|.

    Both are constant between the levels i/N and j/M, which are counted here in units of 1/(NM).
    """
    n = len(a)
    m = len(b)
    levels_of_a = torch.arange(1, n + 1) * m
    levels_of_b = torch.arange(1, m + 1) * n
    levels = torch.unique(torch.cat([levels_of_a, levels_of_b]))
    steps = torch.diff(levels, prepend=levels.new_zeros(1))
    widths = steps.double() / (n * m)
    rows_of_a = (levels - 1) // m
    rows_of_b = (levels - 1) // n
    gaps = (a[rows_of_a] - b[rows_of_b]).abs()
    integrals = widths @ gaps
    return float(integrals.mean())


def cosine_distance(real: Tensor, replay: Tensor) -> float:
    """CosDist between the class means; 1 if a mean is zero and so has no direction."""
    real, replay = _checked(real, replay)
    similarity = torch.nn.functional.cosine_similarity(real.mean(0), replay.mean(0), dim=0)
    return 1 - float(similarity)


def replay_gap(real: Tensor, replay: Tensor, seed: int, bandwidth: float | None = None) -> dict[str, float]:
    """All distances of one class, with bandwidth and sample counts; `w1` if it is affordable, else `sliced_w1`."""
    if bandwidth is None:
        samples = _checked(real, replay, least=2)
        bandwidth = median_bandwidth(*samples)
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
    tasks = len(clean)
    is_before_last = 0 <= task < tasks - 1
    if len(weak) != tasks or not is_before_last:
        raise DataError(
            f"task {task} (counted from 0) was given with {tasks} clean and {len(weak)} weak accuracies, allowed "
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
    if not _can_be_ranked(a, b):
        raise DataError(
            f"rank correlation was given values of shapes {a.shape} and {b.shape}, allowed are two lists of at least 3 "
            "finite numbers, neither constant; add runs or leave this trend out"
        )
    random = generator(seed, "replay-gap", "bootstrap")
    runs = len(a)
    picks = random.integers(runs, size=(draws, runs))
    resampled = _spearman(a[picks], b[picks])
    tail = (1 - level) / 2
    low, high = np.nanquantile(resampled, [tail, 1 - tail])
    rho = _spearman(a[None], b[None])[0]
    return Correlation(float(rho), float(low), float(high))


def _can_be_ranked(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether both are lists of at least 3 finite numbers, equally long and neither constant."""
    are_lists = a.ndim == 1 and b.ndim == 1
    if not are_lists or len(a) != len(b) or len(a) < 3:
        return False
    are_finite = np.isfinite([a, b]).all()
    return bool(are_finite) and np.ptp(a) > 0 and np.ptp(b) > 0


def _spearman(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Pearson's correlation of the ranks of each row; NaN for a constant row."""
    from scipy.stats import rankdata

    u = rankdata(a, axis=1)
    v = rankdata(b, axis=1)
    u = u - u.mean(axis=1, keepdims=True)
    v = v - v.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        covariance = (u * v).sum(axis=1)
        variance_of_u = (u**2).sum(axis=1)
        variance_of_v = (v**2).sum(axis=1)
        return covariance / np.sqrt(variance_of_u * variance_of_v)


def _checked(real: Tensor, replay: Tensor, least: int = 1) -> tuple[Tensor, Tensor]:
    """Both samples in double precision on the CPU. Samples that cannot be compared are a DataError."""
    are_rows = real.ndim == replay.ndim == 2
    have_one_width = are_rows and real.shape[1] == replay.shape[1] > 0
    fewest = min(len(real), len(replay))
    if not have_one_width or fewest < least:
        shapes = f"{tuple(real.shape)} and {tuple(replay.shape)}"
        raise DataError(
            f"real and replay features have shapes {shapes}, allowed are "
            f"[samples, width] of one width with at least {least} samples each; embed both with the same extractor"
        )
    are_finite = real.isfinite().all() and replay.isfinite().all()
    if not are_finite:
        raise DataError("features contain NaN or infinity, allowed are finite numbers; check the run that made them")
    return _as_double(real), _as_double(replay)


def _as_double(sample: Tensor) -> Tensor:
    """A sample in double precision on the CPU."""
    return sample.detach().double().cpu()
