"""Neighbourhood-weighted transport: Δ_y = Σ α_i δ_i / Σ α_i over the K nearest, α_i = exp(−‖u_i − μ_y‖² / 2τ²)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.memory.transport import combine, local_transport, median_bandwidth, squared_distances

few = settings(max_examples=40, deadline=None)
sizes = {"seed": st.integers(0, 10**6), "n": st.integers(1, 30), "d": st.integers(1, 6), "k": st.integers(1, 8)}


def draw(seed: int, n: int, d: int, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(classes, d, generator=rng), torch.randn(n, d, generator=rng), rng


@few
@given(**sizes)
def test_a_constant_drift_is_recovered_for_every_class(seed, n, d, k):
    means, before, rng = draw(seed, n, d)
    drift = torch.randn(d, generator=rng)
    shift, confidence = local_transport(means, before, before + drift, neighbours=k)
    near = confidence > 1e-6  # classes with calibration features near their mean
    torch.testing.assert_close(shift[near], drift.expand_as(shift)[near], rtol=1e-4, atol=1e-5)


@few
@given(**sizes)
def test_no_drift_moves_nothing_and_confidence_lies_between_0_and_k(seed, n, d, k):
    means, before, _ = draw(seed, n, d)
    shift, confidence = local_transport(means, before, before.clone(), neighbours=k)
    assert torch.equal(shift, torch.zeros_like(means))
    assert bool((confidence >= 0).all())
    assert bool((confidence <= min(k, n)).all())


@few
@given(**sizes)
def test_local_transport_equals_the_formula(seed, n, d, k):
    means, before, rng = draw(seed, n, d)
    after = before + torch.randn(n, d, generator=rng)
    shift, confidence = local_transport(means, before, after, neighbours=k, tau=1.5)
    for row, mean in enumerate(means.double()):
        distance = (before.double() - mean).square().sum(1)
        near = distance.argsort()[:k]
        alpha = torch.exp(-distance[near] / (2 * 1.5**2))
        expected = (alpha[:, None] * (after - before).double()[near]).sum(0) / (alpha.sum() + 1e-12)
        torch.testing.assert_close(confidence[row].double(), alpha.sum(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(shift[row].double(), expected, rtol=1e-3, atol=1e-4)


def test_only_the_k_nearest_features_count():
    means = torch.zeros(1, 2)
    before = torch.tensor([[0.1, 0.0], [0.0, 0.2], [0.3, 0.0], [5.0, 5.0]])
    after = before + torch.tensor([[1.0, 0.0], [1.0, 0.0], [99.0, 99.0], [-99.0, 0.0]])
    two, _ = local_transport(means, before, after, neighbours=2, tau=1.0)
    three, _ = local_transport(means, before, after, neighbours=3, tau=1.0)
    torch.testing.assert_close(two, torch.tensor([[1.0, 0.0]]))
    assert float(three[0, 1]) > 1


def test_the_closer_of_two_neighbours_counts_more():
    before = torch.tensor([[0.5], [-2.0]])
    after = before + torch.tensor([[1.0], [-1.0]])
    shift, confidence = local_transport(torch.zeros(1, 1), before, after, neighbours=2, tau=1.0)
    near = torch.exp(torch.tensor(-0.125))
    far = torch.exp(torch.tensor(-2.0))
    torch.testing.assert_close(shift[0, 0], (near - far) / (near + far))
    torch.testing.assert_close(confidence[0], near + far)


def test_the_bandwidth_is_the_median_distance_times_a_factor_unless_given():
    means = torch.zeros(1, 1)
    before = torch.tensor([[1.0], [2.0], [10.0]])
    distances = squared_distances(means, before)
    assert float(median_bandwidth(distances, 1.0)) == 2.0
    assert float(median_bandwidth(distances, 0.5)) == 1.0
    by_rule = local_transport(means, before, before + 1, neighbours=1, factor=0.5)[1]
    by_number = local_transport(means, before, before + 1, neighbours=1, tau=1.0)[1]
    torch.testing.assert_close(by_rule, by_number)
    torch.testing.assert_close(by_number, torch.exp(torch.tensor([-0.5])))


def test_a_mean_without_near_features_does_not_move():
    far = torch.full((1, 3), 1e4)
    shift, confidence = local_transport(far, torch.zeros(4, 3), torch.ones(4, 3), neighbours=5, tau=1.0)
    assert torch.equal(shift, torch.zeros(1, 3))
    assert float(confidence) == 0
    assert torch.equal(combine([shift], [confidence]), torch.zeros(1, 3))


def test_calibration_features_equal_to_the_mean_do_not_divide_by_zero():
    shift, confidence = local_transport(torch.zeros(1, 2), torch.zeros(3, 2), torch.ones(3, 2), neighbours=5)
    torch.testing.assert_close(shift, torch.ones(1, 2))
    assert float(confidence) == 3


@few
@given(seed=st.integers(0, 10**6), clients=st.integers(1, 5))
def test_the_server_weighs_clients_by_confidence(seed, clients):
    rng = torch.Generator().manual_seed(seed)
    shifts = torch.randn(clients, 3, 2, generator=rng)
    q = torch.rand(clients, 3, generator=rng) + 0.01
    expected = (q[..., None] * shifts).sum(0) / q.sum(0)[:, None]
    torch.testing.assert_close(combine(list(shifts), list(q)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("far", [1e-6, 0.0])
def test_a_client_with_low_confidence_hardly_counts(far):
    near_shift = torch.ones(1, 2)
    far_shift = torch.full((1, 2), 100.0)
    together = combine([near_shift, far_shift], [torch.tensor([2.0]), torch.tensor([far])])
    torch.testing.assert_close(together, near_shift, rtol=0, atol=1e-4)
