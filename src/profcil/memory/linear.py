"""Closed-form heads from sums.

A `Summary` has per class a count and a mean of features u, and one second-moment matrix G = Σ ũũᵀ of ũ = [u; 1] over
all classes. Summaries of disjoint examples are additive, so a head solved from the sums of many clients is the head
solved from all their examples. The functions take and return tensors, in float64; clients do not appear. Rows follow
`labels`, ascending class ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profcil.memory.symmetric import add_to_diagonal, cholesky, solve, symmetrise

if TYPE_CHECKING:
    from profcil.memory.sketch import Sketch

ROUNDING = 1e-6  # a variance below this share of the mean square is rounding, since reports are sent in float32
NO_VARIANCE = 1e-5  # the share that is added to the diagonal instead of such a variance
TINY = 1e-30  # a divisor that is smaller counts as this
FLOOR = 1e-9  # a within-class variance below this share of the mean squared feature counts as zero
LEAST_LEVEL = 0.3  # share of the largest eigenvalue of noise: the least variance of a direction (docs/privacy.md)


@dataclass(frozen=True)
class Summary:
    """First moments per class, and second moments over all classes."""

    labels: tuple[int, ...]
    count: Tensor  # [classes]
    mean: Tensor  # [classes, d]
    gram: Tensor  # [d + 1, d + 1], Σ ũũᵀ; [0, 0] where it is not measured
    bound: float = math.inf  # to which the length of features was clipped
    noise: float = 0.0  # variance of the noise on each number of G beside the diagonal
    sum_noise: Tensor | None = None  # [classes], variance of the noise on each number of count · mean
    dispersion: Tensor | None = None  # [classes, 2], see `uncertainty`; None = not measured
    sketch: Sketch | None = None  # in place of G, see `sketch`


def append_one(u: Tensor) -> Tensor:
    """ũ = [u; 1] in float64."""
    ones = u.new_ones(len(u), 1)
    return torch.cat([u.double(), ones.double()], 1)


def clipped(rows: Tensor, bound: float) -> Tensor:
    """The rows, those longer than the bound shortened to it."""
    length = rows.norm(dim=1, keepdim=True).clamp(min=TINY)
    shorter: Tensor = rows * (bound / length).clamp(max=1.0)
    return shorter


def normalised(rows: Tensor, length: float) -> Tensor:
    """The rows with their own mean taken off, and of this length."""
    centred = rows - rows.mean(1, keepdim=True)
    lengths = centred.norm(dim=1, keepdim=True).clamp(min=TINY)
    scaled: Tensor = centred * (length / lengths)
    return scaled


def support_mask(y: Tensor, minimum: int) -> Tensor:
    """A mask of the examples whose class has at least `minimum` examples."""
    _, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    mask: Tensor = (count >= minimum)[row]
    return mask


def class_means(features: Tensor, y: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The classes of some examples, and count and mean of each."""
    labels, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    rows = torch.arange(len(labels), device=y.device)
    one_hot = (row[:, None] == rows).double()
    sums = one_hot.T @ features.double()
    return tuple(labels.tolist()), count, sums / count[:, None]


def summarise(features: Tensor, y: Tensor) -> Summary:
    """The summary of some examples."""
    labels, count, mean = class_means(features, y)
    u = append_one(features)
    gram = u.T @ u
    return Summary(labels, count.double(), mean, gram)


def pool(parts: Iterable[Summary]) -> Summary:
    """The summary of all examples together, each part with any classes. The parts may come from a generator, so that
    only one of them is in memory at a time."""
    rest = iter(parts)
    total = next(rest)
    for number, part in enumerate(rest):
        total = add(total, part, in_place=number > 0)  # the first part belongs to the caller
    return total


def add(a: Summary, b: Summary, in_place: bool = False) -> Summary:
    """The sum of two summaries. With `in_place`, the matrix of the first is overwritten."""
    labels = sorted({*a.labels, *b.labels})
    count = a.count.new_zeros(len(labels))
    width = a.mean.shape[1]
    sums = a.mean.new_zeros(len(labels), width)
    noise = count.clone()
    squares = count.new_zeros(len(labels), 2)
    for part in (a, b):
        places = [labels.index(y) for y in part.labels]
        rows = torch.tensor(places, dtype=torch.long, device=sums.device)
        sums[rows] += part.count[:, None] * part.mean
        count[rows] += part.count
        if part.sum_noise is not None:
            noise[rows] += part.sum_noise
        if part.dispersion is not None:
            squares[rows] += part.count.square()[:, None] * part.dispersion
    mean = sums / count[:, None]
    gram = a.gram if in_place else a.gram.to(torch.float64, copy=True)
    gram += b.gram
    bound = min(a.bound, b.bound)
    sum_noise = None if math.isinf(bound) else noise
    known = a.dispersion is not None and b.dispersion is not None
    dispersion = squares / count.square()[:, None] if known else None
    sketch = a.sketch + b.sketch if a.sketch is not None and b.sketch is not None else None
    return Summary(tuple(labels), count, mean, gram, bound, a.noise + b.noise, sum_noise, dispersion, sketch)


def within_class_covariance(s: Summary) -> Tensor:
    """(Σ uuᵀ − Σ_y n_y μ_y μ_yᵀ) / n."""
    d = s.mean.shape[1]
    weighted = s.count[:, None] * s.mean
    between = s.mean.T @ weighted
    second = s.gram[:d, :d]
    cov = torch.sub(second, between, out=between)
    return symmetrise(cov, out=cov).div_(s.count.sum())


def within_class_variance(s: Summary) -> Tensor:
    """The diagonal of the within-class covariance."""
    second = s.gram.diagonal()[: s.mean.shape[1]] if s.sketch is None else s.sketch.diagonal
    between = (s.count[:, None] * s.mean.square()).sum(0)
    return ((second - between) / s.count.sum()).clamp(min=0.0)


def lda(s: Summary, shrink: float, last: int = 0) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis: w_y = (cov + λ·mean variance·I)⁻¹ μ_y, b_y = −½ w_yᵀμ_y.

    The last `last` features may have another scale; they are shrunk by a mean variance of their own. If no class has
    any variance (one example each), the covariance is a multiple of I, and the head is the nearest class mean. A group
    of features that does not vary within classes, as those of equal inputs, is shrunk by a share of its mean square.
    """
    cov, penalty = covariance_and_penalty(s, shrink, last)
    if s.sum_noise is None:
        return discriminants(s.mean, add_to_diagonal(cov, penalty))
    return noised_discriminants(s, add_to_diagonal(without_noise(cov, s), penalty))


def covariance_and_penalty(s: Summary, shrink: float, last: int = 0) -> tuple[Tensor, Tensor]:
    """The within-class covariance, and what `lda` adds to its diagonal."""
    d = s.mean.shape[1]
    total = s.count.sum()
    sums = s.gram.diagonal()[:d]
    cov = within_class_covariance(s)
    variance = cov.diagonal().mean()
    square = sums.mean() / total
    if variance <= FLOOR * square:
        zeros = torch.zeros_like(cov)
        cov = add_to_diagonal(zeros, square.clamp(min=FLOOR))
    return cov, penalties(cov.diagonal(), sums, total, shrink, last)


def penalties(variance: Tensor, sums: Tensor, total: Tensor, shrink: float, last: int) -> Tensor:
    """What `lda` adds to the diagonal of a covariance, from the variance of each feature and its sum of squares."""
    variances = group_means(variance, last)
    squares = group_means(sums, last) / total
    varies = variances > ROUNDING * squares
    return torch.where(varies, shrink * variances, NO_VARIANCE * squares)


def without_noise(cov: Tensor, s: Summary) -> Tensor:
    """A covariance with noise, made positive. Noise alone has eigenvalues up to 2√(variance·d) (Wigner). Larger ones
    lose what noise has added to them on average. Smaller ones cannot be told from noise and get one common value."""
    edge = 2 * math.sqrt(s.noise * len(cov)) / float(s.count.sum())
    values, vectors = torch.linalg.eigh(cov)
    distinct = values > edge
    corrected = (values + (values.square() - edge**2).clamp(min=0.0).sqrt()) / 2
    others = values[~distinct]
    common = max(LEAST_LEVEL * edge, float(others.sum()) / max(1, len(others)))
    spectrum = torch.where(distinct, corrected, common)
    return symmetrise(vectors * spectrum @ vectors.T)


def discriminants(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """w_y = cov⁻¹ μ_y and b_y = −½ w_yᵀμ_y."""
    weight = solve(cov, mean.T).T
    bias = -0.5 * (weight * mean).sum(1)
    return weight, bias


def noised_discriminants(s: Summary, cov: Tensor) -> tuple[Tensor, Tensor]:
    """The same from means with noise: what noise alone adds to wᵀμ on average is taken off the bias. It differs from
    class to class with their counts, and would decide between them."""
    assert s.sum_noise is not None
    weight, bias = discriminants(s.mean, cov)
    trace = torch.cholesky_inverse(cholesky(cov)).trace()
    return weight, bias + 0.5 * trace * s.sum_noise / s.count**2


def group_means(variances: Tensor, last: int) -> Tensor:
    """Each variance replaced by the mean of its group: the last `last` features, or those before them."""
    first = len(variances) - last
    means = []
    for group in variances.split([first, last]):
        if len(group):
            means.append(group.mean().expand(len(group)))
    return torch.cat(means)


def select_features(s: Summary, features: Sequence[int]) -> Summary:
    """The summary of these features; a feature may be listed twice."""
    constant = s.mean.shape[1]
    rows = torch.tensor([*features, constant], device=s.mean.device)
    mean = s.mean[:, rows[:-1]]
    gram = s.gram[rows][:, rows]
    return replace(s, mean=mean, gram=gram)
