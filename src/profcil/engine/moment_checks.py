"""Whether second moments fit the means and counts that were sent with them. The functions are pure. `rounding` is the
relative error that sums may have, by the encoding in which they were sent."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from profcil.engine.channel import Block, Reply
from profcil.engine.encoding import ROUNDING
from profcil.memory import symmetric
from profcil.memory.sketch import directions


def wrong_moments(block: Block, rounding: float = ROUNDING["float32"]) -> Iterator[str]:
    """Second moments per class below the square of the mean, and matrices that are not positive semidefinite."""
    tensors = block.tensors
    both = "mean" in tensors and "second" in tensors
    if both and below_square(tensors["mean"].double(), tensors["second"].double(), rounding):
        yield "tensor second is below the square of the mean"
    if "scatter" in tensors and not is_semidefinite(symmetric.unpack(tensors["scatter"]), rounding):
        yield "tensor scatter is not positive semidefinite"


def below_square(mean: Tensor, second: Tensor, rounding: float) -> bool:
    """Whether a second moment is below the square of its mean by more than rounding."""
    square = mean.square()
    if second.shape[1] == 1:  # a radius in place of a spread
        square = square.mean(1, keepdim=True)
    if not second.numel():
        return False
    tolerance = rounding * (square + square.mean())
    return bool((second < square - tolerance).any())


def is_semidefinite(matrix: Tensor, rounding: float) -> bool:
    """Whether a symmetric matrix is positive semidefinite up to rounding."""
    if not len(matrix):
        return True
    values = torch.linalg.eigvalsh(matrix)
    return bool(values[0] >= -rounding * values[-1].clamp(min=0))


def wrong_matrices(reply: Reply, rounding: float) -> Iterator[str]:
    """Class means and second moments (a factor or a sketch), in blocks of one reply, that no examples have together."""
    means = [b.tensors for b in reply.blocks.values() if b.labels and {"mean", "count"} <= b.tensors.keys()]
    second = [b.tensors for b in reply.blocks.values() if b.kind == "statistics"]
    for tensors in means:
        mean = tensors["mean"].double()
        count = tensors["count"].double()
        for sent in second:
            if "factor" in sent:
                yield from unfit_factor(mean, count, sent["factor"], rounding)
            if {"product", "diagonal"} <= sent.keys():
                yield from unfit_sketch(mean, count, sent["product"].double(), sent["diagonal"].double(), rounding)


def unfit_factor(mean: Tensor, count: Tensor, packed: Tensor, rounding: float = ROUNDING["float32"]) -> Iterator[str]:
    """Reasons why the matrix G = RᵀR of [u; 1] cannot be that of examples with these class means and counts.

    Its last column has the sums and the number of the examples.
    """
    width = mean.shape[1] + 1
    if not is_triangle(packed.numel(), width):
        yield f"tensor factor has {packed.numel()} numbers, which is no triangle of {width} columns"
        return
    factor = symmetric.unpack_factor(packed, width)
    ones = factor[:, -1]
    total = count.sum()
    if abs(float(ones.square().sum() - total)) > rounding * float(total):
        yield "tensor factor is of another number of examples than the counts"
    sums = (ones @ factor)[:-1]
    scale = (factor.square().sum(0)[:-1] * total).sqrt()
    if bool(((sums - count @ mean).abs() > rounding * (scale + scale.mean())).any()):
        yield "tensor factor has other sums than the class means"
    if not has_scatter(mean, count, factor[:, :-1], rounding):
        yield "tensor factor has less than the second moments of the class means"


def unfit_sketch(
    mean: Tensor, count: Tensor, product: Tensor, diagonal: Tensor, rounding: float = ROUNDING["float32"]
) -> Iterator[str]:
    """Reasons why GΩ and the diagonal of G cannot be those of examples with these class means and counts: the scatter
    within classes is positive along each feature and in the span of the directions Ω, and so is its matrix there."""
    features = mean.shape[1]
    if len(diagonal) != features or len(product) != features or not 0 < product.shape[1] <= features:
        yield f"tensor product or diagonal is no sketch of {features} features"
        return
    if bool((diagonal - count @ mean.square() < -rounding * (diagonal + diagonal.mean())).any()):
        yield "tensor diagonal is below the squares of the class means"
    omega = directions(features, product.shape[1]).to(product.device)
    inner = omega.T @ product
    tolerance = rounding * float(diagonal.sum())
    if bool(((inner - inner.T).abs() > tolerance).any()):
        yield "tensor product is no symmetric matrix times the common directions"
        return
    projected = mean @ omega
    left = inner - projected.T @ (count[:, None] * projected)
    if bool(torch.linalg.eigvalsh((left + left.T) / 2)[0] < -tolerance):
        yield "tensor product has less than the second moments of the class means"


def is_triangle(numbers: int, width: int) -> bool:
    """Whether a packed factor of so many columns can have so many numbers."""
    rows = symmetric.factor_rows(numbers, width)
    return 0 < rows <= width and rows * width - rows * (rows - 1) // 2 == numbers


def has_scatter(mean: Tensor, count: Tensor, factor: Tensor, rounding: float) -> bool:
    """Whether RᵀR − Σ n μμᵀ, the scatter within classes, is positive semidefinite: along each feature and in the span
    of the means, so that no large matrix is computed."""
    second = factor.square().sum(0)
    left = second - count @ mean.square()
    if bool((left < -rounding * (second + second.mean())).any()):
        return False
    projected = factor @ mean.T
    products = mean @ mean.T
    square = projected.T @ projected
    left_in_span = square - products * count @ products
    lowest = torch.linalg.eigvalsh((left_in_span + left_in_span.T) / 2)[0]
    return bool(lowest >= -rounding * square.diagonal().sum())
