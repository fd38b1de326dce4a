"""Closed-form heads from sums, and the transport of these sums by one linear map.

A `Summary` has per class a count and a mean of features u, and one second-moment matrix G = Σ ũũᵀ of ũ = [u; 1] over
all classes. Summaries of disjoint examples are additive, so a head solved from the sums of many clients is the head
solved from all their examples. The functions take and return tensors, in float64; clients do not appear. Rows follow
`labels`, ascending class ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profcil.errors import Failure

ROUNDING = 1e-6  # a variance below this share of the mean square is rounding, since reports are sent in float32
NO_VARIANCE = 1e-5  # the share that is added to the diagonal instead of such a variance
FLOOR = 1e-9  # a within-class variance below this share of the mean squared feature counts as zero
TILE = 512  # rows and columns of a large matrix that are processed at a time
JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # shares of the mean diagonal, tried in turn if Cholesky fails


@dataclass(frozen=True)
class Summary:
    """First moments per class, and second moments over all classes."""

    labels: tuple[int, ...]
    count: Tensor  # [classes]
    mean: Tensor  # [classes, d]
    gram: Tensor  # [d + 1, d + 1], Σ ũũᵀ


@dataclass(frozen=True)
class Drift:
    """Sums over examples of the old ũ_o and of the change δ of u."""

    old: Tensor  # [d + 1, d + 1], Σ ũ_o ũ_oᵀ
    cross: Tensor  # [d + 1, d], Σ ũ_o δᵀ
    square: Tensor  # [d, d], Σ δδᵀ


def append_one(u: Tensor) -> Tensor:
    """ũ = [u; 1] in float64."""
    return torch.cat([u.double(), u.new_ones(len(u), 1).double()], 1)


def support_mask(y: Tensor, minimum: int) -> Tensor:
    """A mask of the examples whose class has at least `minimum` examples."""
    _, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    mask: Tensor = (count >= minimum)[row]
    return mask


def class_means(features: Tensor, y: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    """The classes of some examples, and count and mean of each."""
    labels, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    one_hot = (row[:, None] == torch.arange(len(labels), device=y.device)).double()
    return tuple(labels.tolist()), count, one_hot.T @ features.double() / count[:, None]


def summarise(features: Tensor, y: Tensor) -> Summary:
    """The summary of some examples."""
    labels, count, mean = class_means(features, y)
    u = append_one(features)
    return Summary(labels, count.double(), mean, u.T @ u)


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
    sums = a.mean.new_zeros(len(labels), a.mean.shape[1])
    for part in (a, b):
        rows = torch.tensor([labels.index(y) for y in part.labels], dtype=torch.long, device=sums.device)
        sums[rows] += part.count[:, None] * part.mean
        count[rows] += part.count
    gram = a.gram if in_place else a.gram.to(torch.float64, copy=True)
    return Summary(tuple(labels), count, sums / count[:, None], gram.add_(b.gram))


def within_class_covariance(s: Summary) -> Tensor:
    """(Σ uuᵀ − Σ_y n_y μ_y μ_yᵀ) / n."""
    d = s.mean.shape[1]
    between = s.mean.T @ (s.count[:, None] * s.mean)
    cov = torch.sub(s.gram[:d, :d], between, out=between)
    return symmetrise(cov, out=cov).div_(s.count.sum())


def lda(s: Summary, shrink: float, last: int = 0) -> tuple[Tensor, Tensor]:
    """Linear discriminant analysis: w_y = (cov + λ·mean variance·I)⁻¹ μ_y, b_y = −½ w_yᵀμ_y.

    The last `last` features may have another scale; they are shrunk by a mean variance of their own. If no class has
    any variance (one example each), the covariance is a multiple of I, and the head is the nearest class mean. A group
    of features that does not vary within classes, as those of equal inputs, is shrunk by a share of its mean square.
    """
    d = s.mean.shape[1]
    cov = within_class_covariance(s)
    variance = cov.diagonal().mean()
    square = s.gram.diagonal()[:d].mean() / s.count.sum()
    if variance <= FLOOR * square:
        cov = add_to_diagonal(torch.zeros_like(cov), square.clamp(min=FLOOR))
    variances = group_means(cov.diagonal(), last)
    squares = group_means(s.gram.diagonal()[:d], last) / s.count.sum()
    penalty = torch.where(variances > ROUNDING * squares, shrink * variances, NO_VARIANCE * squares)
    return discriminants(s.mean, add_to_diagonal(cov, penalty))


def discriminants(mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
    """w_y = cov⁻¹ μ_y and b_y = −½ w_yᵀμ_y."""
    weight = solve(cov, mean.T).T
    return weight, -0.5 * (weight * mean).sum(1)


def group_means(variances: Tensor, last: int) -> Tensor:
    """Each variance replaced by the mean of its group: the last `last` features, or those before them."""
    groups = variances.split([len(variances) - last, last])
    return torch.cat([group.mean().expand(len(group)) for group in groups if len(group)])


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
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(add_to_diagonal(matrix, jitter * unit) if jitter else matrix)
        if not int(failed):
            return factor
    raise Failure(
        f"a {size}×{size} second-moment matrix is not positive definite, even with {JITTERS[-1]:g} of its mean "
        f"diagonal added; raise the method's shrink and ridge settings"
    )


def add_to_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    """A copy of the matrix with one value, or one for each row, added to its diagonal."""
    matrix = matrix.clone()
    matrix.diagonal().add_(values)
    return matrix


def select_features(s: Summary, features: Sequence[int]) -> Summary:
    """The summary of these features; a feature may be listed twice."""
    rows = torch.tensor([*features, s.mean.shape[1]], device=s.mean.device)
    return replace(s, mean=s.mean[:, rows[:-1]], gram=s.gram[rows][:, rows])


def drift_of(s: Summary, anchors: int, moving: int) -> Drift:
    """The drift sums in a summary whose features are [u; a; others; δ]: the moving features under the new base,
    `anchors` fixed ones, any others, and the change δ of the moving ones. The old features are ũ_o = [u − δ; a; 1]."""
    width = s.mean.shape[1]
    change = range(width - moving, width)
    rows = torch.tensor([*range(moving + anchors), width, *change], device=s.gram.device)
    gram = s.gram[rows][:, rows]
    gram[:moving] -= gram[-moving:]
    gram[:, :moving] -= gram[:, -moving:]
    return split_drift(gram, moving)


def drift_rows(before: Tensor, after: Tensor) -> Tensor:
    """[ũ_o; δ] of some examples, from their features under the old and the new base. The second-moment matrix of
    these rows has the drift sums."""
    return torch.cat([append_one(before), after.double() - before.double()], 1)


def split_drift(gram: Tensor, moving: int) -> Drift:
    """The drift sums in the second-moment matrix of [ũ_o; δ]."""
    old = len(gram) - moving
    return Drift(gram[:old, :old], gram[:old, old:], gram[old:, old:])


def fit_drift(d: Drift, ridge: float) -> tuple[Tensor, Tensor]:
    """B = (Σ ũ_oũ_oᵀ + ridge·diag)⁻¹ Σ ũ_oδᵀ, and the second moment of the residual δ − Bᵀũ_o."""
    shift = solve(add_to_diagonal(d.old, ridge * d.old.diagonal().clamp(min=FLOOR)), d.cross)
    mixed = shift.T @ d.cross
    return shift, symmetrise(d.square - mixed - mixed.T + shift.T @ d.old @ shift) / d.old[-1, -1]


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
    wide = shift.new_zeros(width + 1, d)
    wide[[*range(len(shift) - 1), width]] = shift
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
        tile = (matrix[a, b] + matrix[b, a].T) / 2
        mean[a, b] = tile
        mean[b, a] = tile.T
    return mean


def pack(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix in float32: half the numbers to send."""
    return torch.cat([row[i:] for i, row in enumerate(matrix)]).float()


def packed_gram(u: Tensor) -> Tensor:
    """pack(uᵀu), computed some rows at a time: the full float64 matrix, four times as many bytes, is never stored."""
    upper = ((u[:, i : i + TILE].T @ u[:, i:]).float() for i in range(0, u.shape[1], TILE))
    return torch.cat([row[i:] for rows in upper for i, row in enumerate(rows)])


def packed_factor(u: Tensor) -> Tensor:
    """The triangular factor R of uᵀu = RᵀR as packed float32 rows, with as many rows as u has, or columns if these are
    fewer.

    R follows from uᵀu alone (up to signs), so it reveals nothing that uᵀu does not. For few examples it has far fewer
    numbers: n·d instead of d²/2.
    """
    if not len(u):
        return u.new_zeros(0).float()
    factor = torch.linalg.qr(u.double(), mode="r").R
    return torch.cat([row[i:] for i, row in enumerate(factor)]).float()


def gram_of_factor(packed: Tensor, width: int) -> Tensor:
    """RᵀR of a packed factor with `width` columns."""
    factor = packed.new_zeros(factor_rows(packed.numel(), width), width, dtype=torch.float64)
    factor[torch.ones_like(factor, dtype=torch.bool).triu()] = packed.double()
    return factor.T @ factor


def factor_rows(numbers: int, width: int) -> int:
    """The number of rows r of a packed factor: r·width − r(r − 1)/2 numbers."""
    twice = 2 * width + 1
    return (twice - math.isqrt(max(0, twice * twice - 8 * numbers))) // 2


def unpack(triangle: Tensor) -> Tensor:
    """The symmetric matrix behind a packed one, in float64."""
    size = int(((8 * triangle.numel() + 1) ** 0.5 - 1) / 2)
    matrix = torch.zeros(size, size, dtype=torch.float64, device=triangle.device)
    for i, row in enumerate(triangle.split([*range(size, 0, -1)])):
        matrix[i, i:] = row
    for a, b in tiles(size):
        matrix[b, a] = matrix[a, b].T if a != b else matrix[a, a] + matrix[a, a].triu(1).T
    return matrix


def tiles(size: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the tiles on and above the diagonal of a square matrix."""
    parts = [slice(i, i + TILE) for i in range(0, size, TILE)]
    return [(a, b) for i, a in enumerate(parts) for b in parts[i:]]
