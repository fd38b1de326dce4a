"""A sketch of second moments adds up, approximates the covariance from below, and is the matrix itself at full rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.memory import linear, sketch
from profcil.memory.linear import Summary
from profcil.methods.parts.summaries import empty_summary

D = 24


def data(seed: int = 0, n: int = 300, decay: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of three classes, whose variance falls from direction to direction. The class means differ little."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=rng)
    rotation = torch.linalg.qr(torch.randn(D, D, generator=rng, dtype=torch.float64)).Q
    scale = 10 * decay ** torch.arange(D, dtype=torch.float64)
    means = 5 + torch.randn(3, D, generator=rng, dtype=torch.float64)
    return means[y] + torch.randn(n, D, generator=rng, dtype=torch.float64) * scale @ rotation, y


def summary(u: torch.Tensor, y: torch.Tensor, rank: int) -> Summary:
    """A summary with a sketch in place of the matrix."""
    labels, count, mean = linear.class_means(u, y)
    return Summary(labels, count.double(), mean, mean.new_zeros(0, 0), sketch=sketch.sketch_of(u, rank))


def covariance_of(u: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return linear.within_class_covariance(linear.summarise(u, y))


def approximation(u: torch.Tensor, y: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """F and D of some examples."""
    s = summary(u, y, rank)
    assert s.sketch is not None
    omega = sketch.directions(u.shape[1], rank)
    return sketch.low_rank(sketch.within_classes(s, s.sketch, omega), omega, torch.tensor(1e-12))


def accuracy(head: tuple[torch.Tensor, torch.Tensor], u: torch.Tensor, y: torch.Tensor) -> float:
    weight, bias = head
    return float(((u.double() @ weight.T + bias).argmax(1) == y).double().mean())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), shrink=st.floats(0.01, 2.0), last=st.integers(0, 5), more=st.integers(0, 9))
def test_a_sketch_of_full_rank_gives_the_head_of_the_matrix(seed, shrink, last, more):
    u, y = data(seed, decay=0.85)
    weight, bias = sketch.lda(summary(u, y, D + more), shrink, last)
    expected = linear.lda(linear.summarise(u, y), shrink, last)
    torch.testing.assert_close(weight, expected[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(bias, expected[1], rtol=1e-4, atol=1e-5)


def test_the_error_falls_with_the_rank():
    errors = []
    for rank in (1, 4, 8, 16, D):
        error = 0.0
        for seed in range(10):
            u, y = data(seed)
            factor, missing = approximation(u, y, rank)
            found = factor @ factor.T + missing.diag()
            covariance = covariance_of(u, y)
            error += float((found - covariance).norm() / covariance.norm()) / 10
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5 and errors[2] < 0.1 and errors[-1] < 1e-9


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_the_covariance_is_approximated_from_below_with_its_own_diagonal(rank):
    u, y = data()
    covariance = covariance_of(u, y)
    factor, missing = approximation(u, y, rank)
    left = torch.linalg.eigvalsh(covariance - factor @ factor.T)
    assert float(left[0]) > -1e-9 * float(left[-1])
    torch.testing.assert_close(factor.square().sum(1) + missing, covariance.diagonal())


def test_sketches_of_parts_add_up_to_the_sketch_of_all():
    u, y = data()
    owner = (torch.arange(len(y)) * 7 + y) % 4
    parts = [summary(u[owner == c], y[owner == c], 6) for c in range(4)]
    empty = empty_summary(u[:0], y[:0], 6)
    found, whole = linear.pool([empty, *parts]), summary(u, y, 6)
    assert found.labels == whole.labels and found.sketch is not None and whole.sketch is not None
    torch.testing.assert_close(found.mean, whole.mean)
    torch.testing.assert_close(found.sketch.product, whole.sketch.product)
    torch.testing.assert_close(found.sketch.diagonal, whole.sketch.diagonal)


def test_a_sketch_beats_the_diagonal_where_features_vary_together():
    """What varies along a few directions across the features hides the classes. The diagonal does not show it."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (2300,), generator=rng)
    common = torch.randn(2300, 3, generator=rng) @ torch.randn(3, D, generator=rng)
    u = torch.randn(3, D, generator=rng)[y] + 9 * common + torch.randn(2300, D, generator=rng)
    s = summary(u[:300], y[:300], 8)
    variance = linear.within_class_variance(s)
    diagonal = sketch.discriminants(s.mean, s.mean.new_zeros(D, 0), 1.01 * variance)
    found = accuracy(sketch.lda(s, 0.01), u[300:], y[300:])
    assert found > 0.9
    assert accuracy(diagonal, u[300:], y[300:]) < 0.8 and accuracy(sketch.nearest_means(s), u[300:], y[300:]) < 0.8


def test_the_directions_are_orthonormal_and_the_same_for_everybody():
    omega = sketch.directions(50, 9)
    torch.testing.assert_close(omega.T @ omega, torch.eye(9, dtype=torch.float64))
    assert torch.equal(omega, sketch.directions(50, 9))


def test_the_head_of_a_factor_is_that_of_its_matrix():
    rng = torch.Generator().manual_seed(1)
    mean, factor = (torch.randn(n, D, generator=rng, dtype=torch.float64) for n in (4, 3))
    diagonal = 0.1 + torch.rand(D, generator=rng, dtype=torch.float64)
    expected = linear.discriminants(mean, factor.T @ factor + diagonal.diag())
    for one, other in zip(sketch.discriminants(mean, factor.T, diagonal), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_one_example_of_each_class_is_the_nearest_mean():
    u = 3 * torch.eye(4, D)
    y = torch.arange(4)
    weight, bias = sketch.lda(summary(u, y, 5), 0.1)
    assert torch.equal((u.double() @ weight.T + bias).argmax(1), y)


def test_the_expected_noise_of_a_mean_does_not_decide_between_classes():
    """Two classes with equal means, one of them with few examples: without the correction it would always lose."""
    rng = torch.Generator().manual_seed(0)
    count = torch.tensor([1000.0, 10.0], dtype=torch.float64)
    noise = torch.tensor([4.0, 4.0], dtype=torch.float64)
    won = []
    for _ in range(200):
        mean = torch.randn(2, 400, generator=rng, dtype=torch.float64) * noise.sqrt()[:, None] / count[:, None]
        s = Summary((0, 1), count, mean, mean.new_zeros(0, 0), bound=1.0, sum_noise=noise)
        x = torch.randn(400, generator=rng, dtype=torch.float64)
        corrected, plain = (x @ w.T + b for w, b in map(sketch.nearest_means, (s, replace(s, sum_noise=None))))
        won.append([float(corrected[1] > corrected[0]), float(plain[1] > plain[0])])
    fair, unfair = torch.tensor(won).mean(0).tolist()
    assert 0.4 < fair < 0.6 and unfair < 0.45
