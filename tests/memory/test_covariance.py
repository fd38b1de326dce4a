"""One within-class covariance for all classes: pooling clients gives that of all their examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profcil.memory import bank, covariance
from profcil.memory.covariance import Covariance


def examples(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features of three classes with far means."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (200,), generator=rng)
    mix = torch.randn(5, 5, generator=rng)
    return torch.randn(200, 5, generator=rng) @ mix + 10 * y[:, None], y


def within(u: Tensor, y: Tensor) -> Tensor:
    """The within-class covariance from all examples at once."""
    centred = torch.cat([u[y == label] - u[y == label].mean(0) for label in y.unique()]).double()
    return centred.T @ centred / len(u)


def scatter_of(u: Tensor, y: Tensor) -> tuple[bank.Moments, Tensor]:
    moments = bank.measure(u, y)
    rank = torch.searchsorted(torch.tensor(moments.labels), y)
    return moments, covariance.packed_scatter(u, rank, moments.mean)


def test_the_pooled_covariance_of_clients_is_that_of_all_examples():
    u, y = examples()
    clients = [slice(0, 20), slice(20, 90), slice(90, 91), slice(91, 200)]
    u[clients[1]] += 3.0  # clients with other means: the difference counts as well
    parts, scatters = zip(*(scatter_of(u[rows], y[rows]) for rows in clients), strict=True)
    pooled = covariance.pool(parts, scatters, bank.pool(parts))
    assert pooled.count == 200
    torch.testing.assert_close(pooled.matrix, within(u, y), rtol=1e-5, atol=1e-4)


def test_the_diagonal_is_the_mean_of_the_squared_spreads():
    u, y = examples(1)
    moments, scatter = scatter_of(u, y)
    pooled = covariance.pool([moments], [scatter], moments)
    made = bank.bank_from_moments(moments)
    mean_variance = (made.count[:, None] * made.spread.double() ** 2).sum(0) / made.count.sum()
    torch.testing.assert_close(pooled.matrix.diagonal(), mean_variance, rtol=1e-4, atol=1e-4)


def test_a_blend_is_weighted_by_counts():
    a = Covariance(torch.eye(2, dtype=torch.float64), 10)
    b = Covariance(torch.full((2, 2), 4.0, dtype=torch.float64), 30)
    blended = covariance.blend(a, b)
    assert blended.count == 40
    torch.testing.assert_close(blended.matrix, 0.25 * a.matrix + 0.75 * b.matrix)


def test_a_blend_with_nothing_is_the_fresh_one():
    nothing = Covariance(torch.zeros(2, 2, dtype=torch.float64), 0)
    fresh = Covariance(torch.eye(2, dtype=torch.float64), 7)
    blended = covariance.blend(nothing, fresh)
    assert torch.equal(blended.matrix, fresh.matrix)


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_a_factor_reproduces_the_matrix_even_a_singular_one(rank):
    rng = torch.Generator().manual_seed(rank)
    root = torch.randn(5, rank, generator=rng).double()
    factor = covariance.factor(root @ root.T)
    assert factor.dtype == torch.float32
    torch.testing.assert_close((factor @ factor.T).double(), root @ root.T, rtol=1e-4, atol=1e-4)


def test_a_carried_covariance_is_that_of_mapped_examples():
    u, y = examples(2)
    rng = torch.Generator().manual_seed(5)
    shift = torch.randn(6, 5, generator=rng, dtype=torch.float64)  # the last row is for the constant
    after = u.double() + u.double() @ shift[:-1] + shift[-1]
    residual = torch.eye(5, dtype=torch.float64)
    carried = covariance.carried(Covariance(within(u, y), 200), shift, residual)
    assert carried.count == 200
    torch.testing.assert_close(carried.matrix, within(after, y) + residual, rtol=1e-4, atol=1e-3)
