"""Closed-form heads from sums, and a memory that follows the representation by one linear map.

A `Summary` holds per class a count and a mean of features u, and one second-moment matrix G = Σ ũũᵀ of ũ = [u; 1] over
all of them. Summaries of disjoint examples add up, so what a server solves from many clients' sums is what one machine
would solve from all their examples. Everything is tensors in, tensors out, in float64; clients are unknown here. Rows
follow `labels`, ascending class ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from profcil.errors import Failure

FLOOR = 1e-9  # within-class variance per squared feature below which there is none to speak of
TILE = 512  # rows and columns of a large matrix that are handled at a time
JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # of the mean diagonal, tried in turn where rounding costs definiteness


@dataclass(frozen=True)
class Summary:
    """First moments per class, second moments over all of them."""

    labels: tuple[int, ...]
    count: Tensor  # [classes]
    mean: Tensor  # [classes, d]
    gram: Tensor  # [d + 1, d + 1], Σ ũũᵀ


@dataclass(frozen=True)
class Drift:
    """How features moved: sums over examples of ũ before and of the change δ of u."""

    old: Tensor  # [d + 1, d + 1], Σ ũ_o ũ_oᵀ
    cross: Tensor  # [d + 1, d], Σ ũ_o δᵀ
    square: Tensor  # [d, d], Σ δδᵀ


def extended(u: Tensor) -> Tensor:
    """ũ = [u; 1] in float64."""
    return torch.cat([u.double(), u.new_ones(len(u), 1).double()], 1)


def supported(y: Tensor, least: int) -> Tensor:
    """A mask of the examples whose class has at least so many of them."""
    _, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    mask: Tensor = (count >= least)[row]
    return mask


def summarise(features: Tensor, y: Tensor, *, packed: bool = False) -> Summary:
    """The sums of some examples; with a matrix that is packed already, where it will be sent and nothing else."""
    labels, row, count = torch.unique(y, return_inverse=True, return_counts=True)
    one_hot = (row[:, None] == torch.arange(len(labels), device=y.device)).double()
    u = extended(features)
    gram = moments(u) if packed else u.T @ u
    return Summary(tuple(labels.tolist()), count.double(), one_hot.T @ u[:, :-1] / count[:, None], gram)


def pool(parts: Iterable[Summary]) -> Summary:
    """The summary of all examples together, classes in any combination; of its parts, one need exist at a time."""
    rest = iter(parts)
    total = next(rest)
    for number, part in enumerate(rest):
        total = add(total, part, own=number > 0)
    return total


def add(a: Summary, b: Summary, own: bool = False) -> Summary:
    """The sum of two; `own` = the first one's matrix may become that of the sum."""
    labels = sorted({*a.labels, *b.labels})
    count = a.count.new_zeros(len(labels))
    sums = a.mean.new_zeros(len(labels), a.mean.shape[1])
    for part in (a, b):
        rows = torch.tensor([labels.index(y) for y in part.labels], dtype=torch.long, device=sums.device)
        sums[rows] += part.count[:, None] * part.mean
        count[rows] += part.count
    gram = a.gram if own else a.gram.to(torch.float64, copy=True)
    return Summary(tuple(labels), count, sums / count[:, None], gram.add_(b.gram))


def within(s: Summary) -> Tensor:
    """The within-class covariance (Σ uuᵀ − Σ_y n_y μ_y μ_yᵀ) / n."""
    d, between = s.mean.shape[1], s.mean.T @ (s.count[:, None] * s.mean)
    cov = torch.sub(s.gram[:d, :d], between, out=between)
    return symmetric(cov, out=cov).div_(s.count.sum())


def lda(s: Summary, shrink: float, apart: int = 0) -> tuple[Tensor, Tensor]:
    """w_y = (cov + λ·mean variance·I)⁻¹ μ_y, b_y = −½ w_yᵀμ_y. Where classes have no spread at all (one example each),
    the covariance is taken as round: the nearest class mean. `apart`: so many last features are of another scale, and
    have a mean variance of their own."""
    cov, d = within(s), s.mean.shape[1]
    variance, size = cov.diagonal().mean(), s.gram.diagonal()[:d].mean() / s.count.sum()
    if variance <= FLOOR * size:
        cov = raised(torch.zeros_like(cov), size.clamp(min=FLOOR))
    weight = solve(raised(cov, shrink * levelled(cov.diagonal(), apart)), s.mean.T).T
    return weight, -0.5 * (weight * s.mean).sum(1)


def ridge(s: Summary, strength: float, apart: int = 0) -> tuple[Tensor, Tensor]:
    """Least squares on one-hot labels, (G/n + λ·mean variance·I)⁻¹ [n_y μ̃_y / n]; the bias is not shrunk."""
    n, gram = s.count.sum(), s.gram / s.count.sum()
    variance = levelled((gram.diagonal() - gram[-1].square())[:-1], apart).clamp(min=FLOOR)
    penalty = torch.cat([strength * variance, variance.new_zeros(1)])
    answer = solve(raised(gram, penalty), (s.count[:, None] * extended(s.mean)).T / n)
    return answer[:-1].T, answer[-1]


def levelled(variances: Tensor, apart: int) -> Tensor:
    """Each feature's variance as the mean of its kind: of the last `apart`, and of those before them."""
    kinds = variances.split([len(variances) - apart, apart])
    return torch.cat([kind.mean().expand(len(kind)) for kind in kinds if len(kind)])


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right for a symmetric positive definite matrix, by Cholesky in float64. One that rounding has made
    indefinite gets a small multiple of its mean diagonal added, the smallest of `JITTERS` that helps."""
    matrix = symmetric(matrix.double())
    if not bool(torch.isfinite(matrix).all()):
        raise Failure(f"a {len(matrix)}×{len(matrix)} second-moment matrix is not finite; lower train.lr or train.clip")
    unit = matrix.diagonal().mean()
    for jitter in JITTERS:
        factor, bad = torch.linalg.cholesky_ex(raised(matrix, jitter * unit) if jitter else matrix)
        if not int(bad):
            return torch.cholesky_solve(right.double(), factor)
    raise Failure(
        f"a {len(matrix)}×{len(matrix)} second-moment matrix is not positive definite, even with {JITTERS[-1]:g} of "
        f"its mean diagonal added; raise the method's shrink and ridge settings"
    )


def raised(matrix: Tensor, by: Tensor) -> Tensor:
    """A matrix with so much added to its diagonal, which may differ from place to place."""
    matrix = matrix.clone()
    matrix.diagonal().add_(by)
    return matrix


def select(s: Summary, features: Sequence[int]) -> Summary:
    """The summary of these features; one may be named twice."""
    rows = torch.tensor([*features, s.mean.shape[1]], device=s.mean.device)
    return replace(s, mean=s.mean[:, rows[:-1]], gram=s.gram[rows][:, rows])


def drift(before: Tensor, after: Tensor, *, packed: bool = False) -> Drift:
    """The sums of some examples' features under two models. `after` may have fewer: the first ones, that moved."""
    old, delta = extended(before), after.double() - before[:, : after.shape[1]].double()
    square = moments if packed else lambda u: u.T @ u
    return Drift(square(old), old.T @ delta, square(delta))


def pool_drift(parts: Iterable[Drift]) -> Drift:
    return reduce(lambda a, b: Drift(a.old + b.old, a.cross + b.cross, a.square + b.square), parts)


def fit_drift(d: Drift, ridge: float) -> tuple[Tensor, Tensor]:
    """B = (Σ ũ_oũ_oᵀ + ridge·diag)⁻¹ Σ ũ_oδᵀ, and the second moment of what it leaves unexplained, δ − Bᵀũ_o."""
    shift = solve(raised(d.old, ridge * d.old.diagonal().clamp(min=FLOOR)), d.cross)
    mixed = shift.T @ d.cross
    return shift, symmetric(d.square - mixed - mixed.T + shift.T @ d.old @ shift) / d.old[-1, -1]


def carry(s: Summary, shift: Tensor, residual: Tensor) -> Summary:
    """The summary under the moved representation: μ ← μ + Bᵀ[μ; 1], G by congruence with I + [B 0], and the residual
    covariance once an example, so that classes spread as real features did. The map reads as many features as it has
    rows, and moves as many as it has columns; those after them stay."""
    d, width = shift.shape[1], s.mean.shape[1]
    wide = shift.new_zeros(width + 1, d)
    wide[[*range(len(shift) - 1), width]] = shift
    mean, gram = s.mean.clone(), s.gram.clone()
    mean[:, :d] += extended(s.mean) @ wide
    gram[:, :d] += s.gram @ wide  # of I + [B 0] most is I: first the columns, then the rows
    gram[:d] += wide.T @ gram
    gram[:d, :d] += s.count.sum() * residual
    return replace(s, mean=mean, gram=symmetric(gram))


def displace(s: Summary, shift: Tensor) -> Summary:
    """The summary with the first features of each mean moved by its own row, and the scatter around it as it was."""
    old, new = extended(s.mean), extended(s.mean)
    new[:, : shift.shape[1]] += shift
    scatter = s.gram - old.T @ (s.count[:, None] * old)
    return replace(s, mean=new[:, :-1], gram=symmetric(scatter + new.T @ (s.count[:, None] * new)))


def symmetric(matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of a matrix and its transpose, tile by tile: a large one's columns lie far apart in memory. `out` may be
    the matrix itself."""
    mean = torch.empty_like(matrix) if out is None else out
    for a, b in tiles(len(matrix)):
        tile = (matrix[a, b] + matrix[b, a].T) / 2
        mean[a, b], mean[b, a] = tile, tile.T
    return mean


def pack(matrix: Tensor) -> Tensor:
    """A symmetric matrix as its upper triangle in float32: half the bytes to send."""
    return torch.cat([row[i:] for i, row in enumerate(matrix)]).float()


def moments(u: Tensor) -> Tensor:
    """pack(uᵀu), some rows at a time: what few examples say about many features takes longer to write than to compute,
    and the matrix itself, twice as large in numbers and four times in bytes, is never there."""
    upper = ((u[:, i : i + TILE].T @ u[:, i:]).float() for i in range(0, u.shape[1], TILE))
    return torch.cat([row[i:] for rows in upper for i, row in enumerate(rows)])


def unpack(triangle: Tensor) -> Tensor:
    """What `pack` took apart, in float64."""
    size = int(((8 * triangle.numel() + 1) ** 0.5 - 1) / 2)
    matrix = torch.zeros(size, size, dtype=torch.float64, device=triangle.device)
    for i, row in enumerate(triangle.split([*range(size, 0, -1)])):
        matrix[i, i:] = row
    for a, b in tiles(size):
        matrix[b, a] = matrix[a, b].T if a != b else matrix[a, a] + matrix[a, a].triu(1).T
    return matrix


def tiles(size: int) -> list[tuple[slice, slice]]:
    """Rows and columns of the tiles on and above a square matrix's diagonal."""
    parts = [slice(i, i + TILE) for i in range(0, size, TILE)]
    return [(a, b) for i, a in enumerate(parts) for b in parts[i:]]
