"""Symmetric matrices of second moments: solving by Cholesky, and the packed forms in which they are sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from profcil.errors import Failure

TILE = 512  # rows and columns of a large matrix that are processed at a time
JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # shares of the mean diagonal, tried in turn if Cholesky fails


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
