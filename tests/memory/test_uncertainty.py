"""Estimates of how sure class means are, and heads that use them, on synthetic classes with one to five examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profcil.memory import bank, linear, symmetric
from profcil.memory.uncertainty import (
    client_sums,
    explained_noise,
    fresh_dispersion,
    mean_variance,
    no_sums,
    older,
    pooled_spread,
    ratios,
    return_sums,
    shrunk_discriminants,
)

D = 30


def classes(seed: int, few: int, d: int = D, signal: float = 0.7) -> tuple[Tensor, Tensor, Tensor]:
    """True means of ten classes, and training examples: the first five classes have `few`, the others 200."""
    rng = torch.Generator().manual_seed(seed)
    means = signal * torch.randn(10, d, generator=rng, dtype=torch.float64)
    y = torch.cat([torch.full((few if label < 5 else 200,), label) for label in range(10)])
    return means, means[y] + torch.randn(len(y), d, generator=rng, dtype=torch.float64), y


def heads(u: Tensor, y: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Plain and shrunk discriminants, and the shrunk means."""
    s = linear.summarise(u, y)
    covariance, penalty = linear.covariance_and_penalty(s, 0.05)
    v = mean_variance(s.count, fresh_dispersion(s.count), no_sums(s.mean))
    head = shrunk_discriminants(
        s.mean, v, float(s.count.sum()), covariance, symmetric.add_to_diagonal(covariance, penalty)
    )
    return linear.lda(s, 0.05), (head.weight, head.bias), head.mean


def accuracy(means: Tensor, head: tuple[Tensor, Tensor], rare: bool, seed: int = 99) -> float:
    """On new examples of the rare or of the other classes."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(5).repeat(100) + (0 if rare else 5)
    x = means[y] + torch.randn(len(y), means.shape[1], generator=rng, dtype=torch.float64)
    return float(((x @ head[0].T + head[1]).argmax(1) == y).double().mean())


@pytest.mark.parametrize("few", [1, 2, 3, 5])
def test_shrunk_means_are_nearer_to_the_true_ones(few):
    plain, shrunk = 0.0, 0.0
    for seed in range(5):
        means, u, y = classes(seed, few)
        own = linear.summarise(u, y).mean
        _, _, moved = heads(u, y)
        plain += float((own - means)[:5].square().sum())
        shrunk += float((moved - means)[:5].square().sum())
    assert shrunk < 0.95 * plain


@pytest.mark.parametrize(("few", "gain"), [(1, 0.3), (2, 0.15), (3, 0.08), (5, 0.04)])
def test_shrunk_heads_recognise_rare_classes_better(few, gain):
    found: dict[str, list[float]] = {"plain": [], "shrunk": [], "others plain": [], "others shrunk": []}
    for seed in range(5):
        means, u, y = classes(seed, few)
        plain, shrunk, _ = heads(u, y)
        for name, head in (("plain", plain), ("shrunk", shrunk)):
            found[name].append(accuracy(means, head, rare=True))
            found[f"others {name}"].append(accuracy(means, head, rare=False))
    mean = {name: sum(values) / 5 for name, values in found.items()}
    assert mean["shrunk"] > mean["plain"] + gain
    assert mean["others shrunk"] > mean["others plain"] - gain / 2 - 0.05  # what they had taken from rare classes


def test_with_many_examples_of_every_class_the_heads_are_equal():
    rng = torch.Generator().manual_seed(0)
    y = torch.arange(5).repeat(4000)
    u = torch.randn(5, 6, generator=rng, dtype=torch.float64)[y] * 2 + torch.randn(20_000, 6, generator=rng)
    (weight, bias), (shrunk_weight, shrunk_bias), _ = heads(u, y)
    x = u[:500]
    plain = (x @ weight.T + bias).softmax(1)
    shrunk = (x @ shrunk_weight.T + shrunk_bias).softmax(1)
    torch.testing.assert_close(shrunk, plain, rtol=0, atol=0.01)


def test_a_head_of_one_class_and_of_equal_counts_is_finite():
    for labels in ([0, 0, 0], [0, 1], [0, 0, 1, 1]):
        y = torch.tensor(labels)
        u = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        _, head, mean = heads(u, y)
        assert all(bool(torch.isfinite(t).all()) for t in (*head, mean))


def test_the_scores_of_a_rare_class_are_divided_by_its_wider_variance():
    """Examples of a class whose mean is of one example are spread by (1 + u)Σ: the weights are those of the shrunk
    mean, divided by 1 + u."""
    _, u, y = classes(0, 1)
    s = linear.summarise(u, y)
    covariance, penalty = linear.covariance_and_penalty(s, 0.05)
    _, (weight, _), mean = heads(u, y)
    sure = 1 / (1 + 5 / s.count)
    centre = (sure[:, None] * s.mean).sum(0) / sure.sum()
    undivided = symmetric.solve(symmetric.add_to_diagonal(covariance, penalty), (mean - centre).T).T
    wider = undivided.norm(dim=1) / weight.norm(dim=1)
    assert float(wider[:5].min()) > 1.15
    assert float(wider[5:].max()) < 1.01


def test_noise_of_examples_outside_the_covariance_is_estimated_from_those_inside():
    """With as many dimensions as half the examples, tr(P⁻¹Σ̂) is far below tr(P⁻¹Σ)."""
    rng = torch.Generator().manual_seed(3)
    u = torch.randn(100, 50, generator=rng, dtype=torch.float64)
    covariance = u.T @ u / 100
    factor = symmetric.cholesky(symmetric.add_to_diagonal(covariance, covariance.new_tensor(0.05)))
    inverse = torch.cholesky_inverse(factor)
    true = float(inverse.trace())  # Σ = I
    inside = float((inverse * covariance).sum())
    found = float(explained_noise(factor, covariance, 100))
    assert inside < 0.7 * true
    assert abs(found - true) < 0.25 * true


# -- between clients ---------------------------------------------------------------------------------------------------


def reports(between: float, seed: int, clients: int = 8, n: int = 6) -> tuple[list, list, list, Tensor]:
    """Counts, means and rows of some clients, and the pooled within-class variance. The class means of clients differ
    by the deviation √between."""
    rng = torch.Generator().manual_seed(seed)
    scale = torch.rand(D, generator=rng) * 3 + 0.5  # features in different units
    true = torch.randn(6, D, generator=rng)
    examples, labels, parts = [], [], []
    for c in range(clients):
        y = torch.arange(6).repeat(n + c % 3)
        own = between**0.5 * torch.randn(6, D, generator=rng)
        u = (true + own)[y] * scale + scale * torch.randn(len(y), D, generator=rng)
        parts.append(linear.summarise(u, y))
        examples.append(u)
        labels.append(y)
    total = linear.summarise(torch.cat(examples), torch.cat(labels))
    rows = [torch.arange(6) for _ in parts]
    return [p.count for p in parts], [p.mean for p in parts], rows, linear.within_class_variance(total)


@pytest.mark.parametrize("between", [0.0, 0.1, 0.5, 2.0])
def test_the_variance_between_clients_is_estimated_right(between):
    sums = sum(client_sums(*reports(between, seed)) for seed in range(10))
    found, _ = ratios(torch.cat([sums, torch.zeros(2)]))
    assert float(found) == pytest.approx(between, abs=0.02 + 0.1 * between)


def test_one_client_says_nothing_about_the_variance_between_clients():
    counts, means, rows, variance = reports(1.0, 0)
    alone = client_sums(counts[:1], means[:1], rows[:1], variance)
    assert alone.tolist() == [0.0, 0.0]
    assert float(ratios(torch.cat([alone, alone]))[0]) == 0.0


def test_the_error_of_a_mean_has_the_variance_that_is_claimed():
    """Means of three clients, one of them with most of the examples, over many draws."""
    between, counts = 0.4, torch.tensor([20.0, 3.0, 1.0])
    rng = torch.Generator().manual_seed(0)
    draws = 4000
    own = between**0.5 * torch.randn(draws, 3, generator=rng)
    measured = own + torch.randn(draws, 3, generator=rng) / counts.sqrt()
    error = (measured * counts).sum(1) / counts.sum()
    dispersion = torch.tensor([[float(counts.square().sum() / counts.sum() ** 2), 0.0]])
    sums = torch.tensor([between, 1.0, 0.0, 0.0])
    v = mean_variance(counts.sum()[None], dispersion, sums)
    assert float(error.square().mean()) == pytest.approx(float(v), rel=0.1)


# -- age ---------------------------------------------------------------------------------------------------------------


def test_the_variance_that_a_position_adds_is_estimated_from_classes_that_return():
    rng = torch.Generator().manual_seed(0)
    count = torch.tensor([5, 20, 3, 50] * 50)
    age = torch.tensor([1.0, 3.0] * 100)
    drift = 0.2
    first = torch.randn(200, D, generator=rng) / count[:, None].sqrt()
    first += (drift * age)[:, None].sqrt() * torch.randn(200, D, generator=rng)
    second = torch.randn(200, D, generator=rng) / count[:, None].sqrt()
    stored = torch.stack([torch.ones(200), age], 1)
    sums = no_sums(first)
    found = return_sums((first, count, stored), (second, count, fresh_dispersion(count)), sums, torch.ones(D))
    _, drift_found = ratios(torch.cat([torch.zeros(2), found]))
    assert float(drift_found) == pytest.approx(drift, rel=0.1)


def test_an_older_mean_is_less_sure():
    count = torch.tensor([10, 10])
    sums = torch.tensor([0.0, 0.0, 0.3, 1.0])
    now = fresh_dispersion(count)
    later = older(older(now))
    assert mean_variance(count, now, sums).tolist() == pytest.approx([0.1, 0.1])
    assert mean_variance(count, later, sums).tolist() == pytest.approx([0.7, 0.7])


def test_a_negative_estimate_counts_as_none():
    assert [float(x) for x in ratios(torch.tensor([-1.0, 2.0, -3.0, 1.0]))] == [0.0, 0.0]


# -- what is stored ----------------------------------------------------------------------------------------------------


def test_dispersion_of_pooled_parts_is_that_of_all_clients():
    parts = []
    for label_counts in ((4, 1), (2, 0), (6, 3)):
        y = torch.cat([torch.full((n,), label) for label, n in enumerate(label_counts)])
        u = torch.randn(len(y), 3)
        measured = bank.measure(u, y)
        parts.append((measured, linear.summarise(u, y)))
    pooled = bank.pool([bank.replace(m, dispersion=fresh_dispersion(m.count)) for m, _ in parts])
    summed = linear.pool([linear.replace(s, dispersion=fresh_dispersion(s.count)) for _, s in parts])
    expected = [(16 + 4 + 36) / 144, (1 + 9) / 16]
    assert pooled.dispersion[:, 0].tolist() == pytest.approx(expected)
    assert summed.dispersion[:, 0].tolist() == pytest.approx(expected)
    assert bank.pool([m for m, _ in parts]).dispersion is None
    assert linear.pool([s for _, s in parts]).dispersion is None


def test_spreads_of_classes_with_few_examples_are_shrunk_towards_the_pooled_one():
    """A class with one example has no spread of its own; one with many examples keeps its own."""
    rng = torch.Generator().manual_seed(0)
    true = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5])
    counts = [1, 400, 400, 400, 400]
    y = torch.cat([torch.full((n,), label) for label, n in enumerate(counts)])
    stored = bank.bank_from_moments(bank.measure(true[y][:, None] * torch.randn(len(y), 20, generator=rng), y))
    found = pooled_spread(stored.spread, stored.count)
    pooled = (true[1:].square().mean()).sqrt()
    assert float(stored.spread[0].max()) < 0.01
    torch.testing.assert_close(found[0].mean(), pooled, rtol=0.1, atol=0.0)
    torch.testing.assert_close(found[1:].mean(1), true[1:], rtol=0.1, atol=0.0)
