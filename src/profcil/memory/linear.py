"""Closed-form heads from sums, and the transport of these sums by one linear map.

A `Summary` has per class a count and a mean of features u, and one second-moment matrix G = Σ ũũᵀ of ũ = [u; 1] over
all classes. Summaries of disjoint examples are additive, so a head solved from the sums of many clients is the head
solved from all their examples. The functions take and return tensors, in float64; clients do not appear. Rows follow
`labels`, ascending class ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from profcil.errors import Failure

if TYPE_CHECKING:
    from profcil.memory.sketch import Sketch

ROUNDING = 1e-6  # a variance below this share of the mean square is rounding, since reports are sent in float32
NO_VARIANCE = 1e-5  # the share that is added to the diagonal instead of such a variance
TINY = 1e-30  # a divisor that is smaller counts as this
FLOOR = 1e-9  # a within-class variance below this share of the mean squared feature counts as zero
TILE = 512  # rows and columns of a large matrix that are processed at a time
LEAST_LEVEL = 0.3  # of the largest eigenvalue of noise: the least that a direction below it varies (docs/privacy.md)
JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # shares of the mean diagonal, tried in turn if Cholesky fails


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


@dataclass(frozen=True)
class Drift:
    """Sums over examples of the old ũ_o and of the change δ of u."""

    old: Tensor  # [d + 1, d + 1], Σ ũ_o ũ_oᵀ
    cross: Tensor  # [d + 1, d], Σ ũ_o δᵀ
    square: Tensor  # [d, d], Σ δδᵀ


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


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right for a symmetric positive definite matrix, by Cholesky in float64."""
    solution: Tensor = torch.cholesky_solve(right.double(), cholesky(matrix))
    return solution


def cholesky(matrix: Tensor) -> Tensor:
    """L with LLᵀ = matrix, in float64. If rounding has made the matrix indefinite, the smallest of `JITTERS` that helps
    is added to the diagonal."""
    matrix = symmetrise(matrix.double())
    size = len(matrix)
    if not bool(torch.isfinite(matrix).all()):
        raise Failure(f"a {size}×{size} second-moment matrix has NaN or infinite entries; lower train.lr or train.clip")
    unit = matrix.diagonal().mean()
    for jitter in JITTERS:
        raised = add_to_diagonal(matrix, jitter * unit) if jitter else matrix
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(raised)
        if not int(failed):
            return factor
    largest = JITTERS[-1]
    raise Failure(
        f"a {size}×{size} second-moment matrix is not positive definite, even with {largest:g} of its mean "
        f"diagonal added; raise the method's shrink and ridge settings"
    )


def add_to_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    """A copy of the matrix with one value, or one for each row, added to its diagonal."""
    matrix = matrix.clone()
    matrix.diagonal().add_(values)
    return matrix


def select_features(s: Summary, features: Sequence[int]) -> Summary:
    """The summary of these features; a feature may be listed twice."""
    constant = s.mean.shape[1]
    rows = torch.tensor([*features, constant], device=s.mean.device)
    mean = s.mean[:, rows[:-1]]
    gram = s.gram[rows][:, rows]
    return replace(s, mean=mean, gram=gram)


def drift_of(s: Summary, anchors: int, moving: int) -> Drift:
    """The drift sums in a summary whose features are [u; a; others; δ]: the moving features under the new base,
    `anchors` fixed ones, any others, and the change δ of the moving ones. The old features are ũ_o = [u − δ; a; 1]."""
    width = s.mean.shape[1]
    old = range(moving + anchors)
    change = range(width - moving, width)
    rows = torch.tensor([*old, width, *change], device=s.gram.device)
    gram = s.gram[rows][:, rows]
    gram[:moving] -= gram[-moving:]
    gram[:, :moving] -= gram[:, -moving:]
    return split_drift(gram, moving)


def drift_rows(before: Tensor, after: Tensor) -> Tensor:
    """[ũ_o; δ] of some examples, from their features under the old and the new base. The second-moment matrix of
    these rows has the drift sums."""
    change = after.double() - before.double()
    return torch.cat([append_one(before), change], 1)


def split_drift(gram: Tensor, moving: int) -> Drift:
    """The drift sums in the second-moment matrix of [ũ_o; δ]."""
    width = len(gram) - moving
    old = gram[:width, :width]
    cross = gram[:width, width:]
    square = gram[width:, width:]
    return Drift(old, cross, square)


def fit_drift(d: Drift, ridge: float) -> tuple[Tensor, Tensor]:
    """B = (Σ ũ_oũ_oᵀ + ridge·diag)⁻¹ Σ ũ_oδᵀ, and the second moment of the residual δ − Bᵀũ_o."""
    diagonal = d.old.diagonal().clamp(min=FLOOR)
    penalised = add_to_diagonal(d.old, ridge * diagonal)
    shift = solve(penalised, d.cross)
    mixed = shift.T @ d.cross
    residual = d.square - mixed - mixed.T + shift.T @ d.old @ shift
    examples = d.old[-1, -1]
    return shift, symmetrise(residual) / examples


def carried_means(mean: Tensor, shift: Tensor) -> Tensor:
    """μ + Bᵀ[μ; 1], in float64."""
    return mean.double() + append_one(mean) @ shift


def apply_drift(s: Summary, shift: Tensor, residual: Tensor) -> Summary:
    """The summary after a linear drift: μ ← μ + Bᵀ[μ; 1], and G by congruence with I + [B 0].

    The residual covariance is added once per example, so that the variance of classes grows as that of real features
    did. B reads the first features, as many as it has rows (and the constant), and moves as many as it has columns. All
    later features stay.
    """
    d = shift.shape[1]
    width = s.mean.shape[1]
    rows = [*range(len(shift) - 1), width]
    wide = shift.new_zeros(width + 1, d)
    wide[rows] = shift
    mean = s.mean.clone()
    mean[:, :d] += append_one(s.mean) @ wide
    gram = s.gram.clone()
    gram[:, :d] += s.gram @ wide  # I + [B 0] is mostly I: update the columns, then the rows
    gram[:d] += wide.T @ gram
    gram[:d, :d] += s.count.sum() * residual
    return replace(s, mean=mean, gram=symmetrise(gram))


def symmetrise(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of a matrix and its transpose, computed tile by tile: the columns of a large matrix are far apart in
    memory. `out` may be the matrix itself."""
    mean = torch.empty_like(matrix) if out is None else out
    for a, b in tiles(len(matrix)):
        mirrored = matrix[b, a].T
        tile = (matrix[a, b] + mirrored) / 2
        mean[a, b] = tile
        mean[b, a] = tile.T
    return mean


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix in float32: half the numbers to send."""
    return packed_rows(matrix).float()


def packed_rows(matrix: Tensor) -> Tensor:
    """Each row from its diagonal entry on, one after another."""
    return torch.cat([row[i:] for i, row in enumerate(matrix)])


def packed_gram(u: Tensor) -> Tensor:
    """pack(uᵀu), computed some rows at a time: the full float64 matrix, four times as many bytes, is never stored."""
    width = u.shape[1]
    upper = []
    for i in range(0, width, TILE):
        tile = u[:, i : i + TILE]
        rows = tile.T @ u[:, i:]
        upper.append(packed_rows(rows.float()))
    return torch.cat(upper)


def packed_factor(u: Tensor) -> Tensor:
    """The triangular factor R of uᵀu = RᵀR as packed float32 rows, with as many rows as u has, or columns if these are
    fewer.

    R follows from uᵀu alone (up to signs), so it reveals nothing that uᵀu does not. For few examples it has far fewer
    numbers: n·d instead of d²/2.
    """
    if not len(u):
        return u.new_zeros(0).float()
    factor = torch.linalg.qr(u.double(), mode="r").R
    return packed_rows(factor).float()


def gram_of_factor(packed: Tensor, width: int) -> Tensor:
    """RᵀR of a packed factor with `width` columns."""
    factor = unpack_factor(packed, width)
    return factor.T @ factor


def unpack_factor(packed: Tensor, width: int) -> Tensor:
    """R of a packed factor with `width` columns, in float64."""
    rows = factor_rows(packed.numel(), width)
    factor = packed.new_zeros(rows, width, dtype=torch.float64)
    upper = torch.ones_like(factor, dtype=torch.bool).triu()
    factor[upper] = packed.double()
    return factor


def sent_gram(tensors: Mapping[str, Tensor], width: int) -> Tensor:
    """The second-moment matrix of a report: packed as it is, or as a factor with `width` columns."""
    if "gram" in tensors:
        return unpack(tensors["gram"])
    return gram_of_factor(tensors["factor"], width)


def factor_rows(numbers: int, width: int) -> int:
    """The number of rows r of a packed factor: r·width − r(r − 1)/2 numbers."""
    twice = 2 * width + 1
    discriminant = max(0, twice * twice - 8 * numbers)
    return (twice - math.isqrt(discriminant)) // 2


def unpack(triangle: Tensor) -> Tensor:
    """The symmetric matrix behind a packed one, in float64."""
    root = (8 * triangle.numel() + 1) ** 0.5
    size = int((root - 1) / 2)
    matrix = torch.zeros(size, size, dtype=torch.float64, device=triangle.device)
    upper = torch.ones(size, size, dtype=torch.bool, device=triangle.device).triu()
    matrix.masked_scatter_(upper, triangle.double())
    for a, b in tiles(size):
        tile = matrix[a, b]
        if a == b:
            matrix[a, a] = tile + tile.triu(1).T
        else:
            matrix[b, a] = tile.T
    return matrix


def tiles(size: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the tiles on and above the diagonal of a square matrix."""
    parts = [slice(i, i + TILE) for i in range(0, size, TILE)]
    return list(combinations_with_replacement(parts, 2))
