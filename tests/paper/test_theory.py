"""The propositions of the paper's appendix about memory, rehearsal and transport, tested on the code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from profcil.memory.bank import Bank, bank_from_moments, measure
from profcil.memory.rehearsal import Rehearsal, pseudo_features
from profcil.memory.transport import combine, local_transport
from profcil.model.losses import cross_entropy
from profcil.model.net import Tail

fast = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10**6)


def w1(a: Tensor, b: Tensor) -> float:
    """The Wasserstein-1 distance between two samples of equal size: the optimal assignment."""
    cost = torch.cdist(a.double(), b.double()).numpy()
    return float(cost[linear_sum_assignment(cost)].mean())


def plain_tail(head: Tensor) -> Tail:
    """A tail whose adapter is the identity (Up = 0), as at the start of a stream."""
    d = head.shape[1]
    adapter = {"scale": torch.ones(d), "shift": torch.zeros(d), "down": torch.ones(1, d), "down_bias": torch.zeros(1)}
    return Tail(adapter | {"up": torch.zeros(d, 1), "up_bias": torch.zeros(d)}, {"weight": head})


def risk(tail: Tail, u: Tensor, label: int) -> float:
    """The mean cross-entropy of features of one class."""
    allowed = torch.ones(len(tail.head["weight"]), dtype=torch.bool)
    return float(cross_entropy(tail.classify(u), torch.full((len(u),), label), allowed))


# -- Proposition (projected-memory approximation) ---------------------------------------------------------------------


@fast
@given(seed=seeds, classes=st.integers(1, 3), d=st.integers(1, 4), noise=st.sampled_from([0.0, 0.3, 1.0]))
def test_the_risk_on_memory_differs_by_at_most_the_lipschitz_constant_times_w1(seed, classes, d, noise):
    rng = torch.Generator().manual_seed(seed)
    n = 20
    head = torch.randn(4, d, generator=rng)
    tail = plain_tail(head)
    gap = 0.0
    bound = 0.0
    for label in range(classes):
        real = torch.randn(n, d, generator=rng).exp() + torch.randn(d, generator=rng)  # far from Gaussian
        bank = bank_from_moments(measure(real, torch.full((n,), label)))
        memory = pseudo_features(bank.mean, bank.spread, n, noise, rng)
        lipschitz = float((head - head[label]).norm(dim=1).max())  # ∇_u CE = Σ_j p_j (w_j − w_y)
        gap += (risk(tail, real, label) - risk(tail, memory, label)) / classes
        bound += lipschitz * w1(real, memory) / classes
    assert abs(gap) <= bound + 1e-5


@fast
@given(seed=seeds, d=st.integers(1, 4), noise=st.sampled_from([0.1, 1.0]))
def test_an_inexact_memory_costs_at_most_the_error_of_its_mean_and_spread(seed, d, noise):
    rng = torch.Generator().manual_seed(seed)
    n = 40
    real = torch.randn(n, d, generator=rng)
    ideal = (torch.zeros(1, d), torch.ones(1, d))
    estimate = (0.5 * torch.randn(1, d, generator=rng), 1 + 0.5 * torch.rand(1, d, generator=rng))
    best, ours = (pseudo_features(*q, n, noise, torch.Generator().manual_seed(seed)) for q in (ideal, estimate))
    epsilon = pseudo_features(*ideal, n, 1.0, torch.Generator().manual_seed(seed))
    drawn = float(epsilon.square().mean(0).max()) ** 0.5  # the standard deviation of the draw, 1 in expectation
    moved = float((estimate[0] - ideal[0]).norm()) + noise * drawn * float((estimate[1] - ideal[1]).norm())
    assert w1(best, ours) <= moved + 1e-5
    assert w1(real, ours) <= w1(real, best) + moved + 1e-5


def test_the_estimation_error_falls_with_the_square_root_of_the_number_of_examples():
    def error(n: int) -> float:
        rng = torch.Generator().manual_seed(n)
        banks = [
            bank_from_moments(measure(torch.randn(n, 8, generator=rng), torch.zeros(n, dtype=torch.long)))
            for _ in range(50)
        ]
        return float(np.mean([b.mean.norm().item() + (b.spread - 1).norm().item() for b in banks]))

    assert error(40) / error(640) == pytest.approx(4, rel=0.15)  # O(√(d/n)): a quarter for sixteen times the examples


# -- Lemma (unbiased gradient of the balanced objective) --------------------------------------------------------------


def gradients(tail: Tail, u: Tensor, y: Tensor, share: Tensor) -> list[Tensor]:
    """The gradient of Σ share_i ℓ(u_i, y_i) for adapter and head."""
    parameters = [p.requires_grad_() for p in (*tail.adapter.values(), *tail.head.values())]
    losses = -tail.classify(u).log_softmax(-1).gather(1, y[:, None]).squeeze(1)
    return list(torch.autograd.grad((share * losses).sum(), parameters))


def random_tail(d: int, classes: int, rng: torch.Generator) -> Tail:
    shapes = {"scale": (d,), "shift": (d,), "down": (2, d), "down_bias": (2,), "up": (d, 2), "up_bias": (d,)}
    adapter = {k: torch.randn(*s, generator=rng, dtype=torch.float64) for k, s in shapes.items()}
    return Tail(adapter, {"weight": torch.randn(classes, d, generator=rng, dtype=torch.float64)})


@fast
@given(seed=seeds, counts=st.tuples(st.integers(1, 4), st.integers(1, 4)), old=st.integers(0, 3))
def test_the_gradient_of_an_epoch_is_that_of_the_balanced_objective(seed, counts, old):
    rng = torch.Generator().manual_seed(seed)
    d = 3
    y = torch.tensor([1] * counts[0] + [4] * counts[1])
    features = torch.randn(len(y), d, generator=rng, dtype=torch.float64)
    remembered = (0, 2, 6)[:old]
    mean = torch.randn(old, d, generator=rng, dtype=torch.float64)
    bank = Bank(remembered, mean, torch.ones_like(mean), torch.ones(old, dtype=torch.int32))
    # Twelve is a multiple of every count, so all real features appear equally often and the lemma holds exactly.
    epoch = Rehearsal(features, y, bank, quota=12, noise=0.0).epoch(rng)
    tail = random_tail(d, 7, rng)
    classes = 2 + old
    n = len(epoch["y"])
    found = gradients(tail, epoch["u"], epoch["y"], torch.full((n,), 1 / n, dtype=torch.float64))
    each = [1 / counts[0]] * counts[0] + [1 / counts[1]] * counts[1] + [1.0] * old
    share = torch.tensor(each, dtype=torch.float64) / classes
    u = torch.cat([features, mean])
    labels = torch.cat([y, torch.tensor(remembered, dtype=torch.long)])
    for ours, balanced in zip(found, gradients(tail, u, labels, share), strict=True):
        torch.testing.assert_close(ours, balanced, rtol=1e-6, atol=1e-8)


def test_small_quotas_are_unbiased_over_many_epochs():
    rng = torch.Generator().manual_seed(3)
    y = torch.tensor([1] * 7 + [4] * 2)
    features = torch.randn(9, 3, generator=rng)
    source = Rehearsal(features, y, None, quota=2, noise=0.0)
    seen = torch.zeros(9)
    for _ in range(2000):
        epoch = source.epoch(rng)
        seen += (epoch["u"][:, None] == features).all(2).sum(0)
    share = seen / seen.sum()
    expected = torch.tensor([1 / 7] * 7 + [1 / 2] * 2) / 2  # uniform over classes, then over the features of the class
    torch.testing.assert_close(share, expected, rtol=0.1, atol=0)


# -- Theorem (local consistency of transport) -------------------------------------------------------------------------


def field(d: int, beta: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """An affine displacement δ(u) = A u + b whose Lipschitz constant is exactly β."""
    a = torch.randn(d, d, generator=rng)
    return beta * a / torch.linalg.matrix_norm(a, 2), torch.randn(d, generator=rng)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, beta=st.sampled_from([0.0, 0.2, 1.0]), noise=st.sampled_from([0.0, 0.5, 2.0]), k=st.integers(1, 8))
def test_the_error_of_transport_is_within_the_bound(seed, beta, noise, k):
    rng = torch.Generator().manual_seed(seed)
    d = 3
    clients = 3
    draws = 100
    a, b = field(d, beta, rng)
    means = torch.randn(2, d, generator=rng)
    truth = means @ a.T + b
    before = [torch.randn(12, d, generator=rng) for _ in range(clients)]
    local_error = torch.zeros(clients, 2)
    joint_error = torch.zeros(2)
    for _ in range(draws):
        after = [u + u @ a.T + b + noise * torch.randn(u.shape, generator=rng) for u in before]
        summaries = [local_transport(means, u, v, neighbours=k, tau=1.0) for u, v in zip(before, after, strict=True)]
        local_error += torch.stack([(shift - truth).square().sum(1) for shift, _ in summaries]) / draws
        joint_error += (combine(*zip(*summaries, strict=True)) - truth).square().sum(1) / draws
    q = torch.stack([confidence for _, confidence in summaries])
    radius = torch.stack([torch.cdist(means, u).topk(k, largest=False).values[:, -1] for u in before])  # r_{c,y}
    sigma = d * noise**2  # E‖Σ w ξ‖² = d s² Σ w² for isotropic noise
    is_confident = q > 1e-6
    local_bound = 2 * beta**2 * radius**2 + 2 * sigma / q + 1e-5
    joint_bound = 2 * beta**2 * radius.amax(0) ** 2 + 2 * sigma / q.sum(0) + 1e-5
    assert bool((local_error <= local_bound)[is_confident].all())
    assert bool((joint_error <= joint_bound)[is_confident.all(0)].all())


def test_local_transport_is_better_than_no_shift_and_than_a_common_shift():
    rng = torch.Generator().manual_seed(0)
    a, b = field(4, 0.8, rng)
    centres = 3 * torch.randn(5, 4, generator=rng)
    before = (centres[:, None] + 0.3 * torch.randn(5, 20, 4, generator=rng)).flatten(0, 1)
    after = before + before @ a.T + b
    truth = centres @ a.T + b
    shift, _ = local_transport(centres, before, after, neighbours=5)
    common = (after - before).mean(0).expand_as(truth)
    errors = [float((estimate - truth).norm()) for estimate in (shift, common, torch.zeros_like(truth))]
    assert errors[0] < 0.2 * errors[1] < errors[2]
