"""The bank: pooled moments of parts equal the moments of all data (the paper's global-memory refresh)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.memory.bank import FLOOR, Moments, bank_from_moments, empty_bank, measure, pool, update

few = settings(max_examples=40, deadline=None)
IDS = torch.tensor([2, 5, 9, 40])  # class ids with gaps


def draw(seed: int, n: int, d: int, parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, labels, and which client holds each row."""
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(n, d, generator=rng) * 2 + torch.randn(d, generator=rng)
    y = IDS[torch.randint(len(IDS), (n,), generator=rng)]
    return features, y, torch.randint(parts, (n,), generator=rng)


def split(features: torch.Tensor, y: torch.Tensor, owner: torch.Tensor, radius: bool) -> list[Moments]:
    return [measure(features[owner == k], y[owner == k], radius=radius) for k in owner.unique()]


def close(a: Moments, b: Moments) -> None:
    assert a.labels == b.labels
    assert torch.equal(a.count, b.count)
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(a.second, b.second, rtol=1e-5, atol=1e-5)


sizes = {"seed": st.integers(0, 10**6), "n": st.integers(1, 60), "d": st.integers(1, 6), "parts": st.integers(1, 5)}


@few
@given(radius=st.booleans(), **sizes)
def test_pooled_moments_of_any_partition_equal_moments_of_all_data(seed, n, d, parts, radius):
    features, y, owner = draw(seed, n, d, parts)
    pooled = pool(split(features, y, owner, radius))
    whole = measure(features, y, radius=radius)
    close(pooled, whole)
    torch.testing.assert_close(bank_from_moments(pooled).spread, bank_from_moments(whole).spread, rtol=1e-3, atol=3e-3)


@few
@given(radius=st.booleans(), **sizes)
def test_the_order_of_the_parts_does_not_matter(seed, n, d, parts, radius):
    moments = split(*draw(seed, n, d, parts), radius)
    close(pool(moments), pool(moments[::-1]))


@few
@given(radius=st.booleans(), **sizes)
def test_the_bank_holds_mean_spread_and_count_of_each_class(seed, n, d, parts, radius):
    features, y, _ = draw(seed, n, d, parts)
    bank = bank_from_moments(measure(features, y, radius=radius))
    assert bank.labels == tuple(sorted(set(y.tolist())))
    for row, label in enumerate(bank.labels):
        own = features[y == label].double()
        variance = own.var(0, correction=0)
        expected = variance.mean().reshape(1) if radius else variance  # ρ² = E‖z − μ‖² / d
        torch.testing.assert_close(bank.mean[row].double(), own.mean(0), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(bank.spread[row].double() ** 2, expected, rtol=1e-4, atol=1e-4)
        assert int(bank.count[row]) == len(own)


@few
@given(radius=st.booleans(), **sizes)
def test_a_returning_class_merged_by_counts_equals_one_measurement_of_all_data(seed, n, d, parts, radius):
    features, y, owner = draw(seed, n + 1, d, 2)
    first, *rest = split(features, y, owner, radius)
    bank = bank_from_moments(first)
    for part in rest:
        bank = update(bank, part, "counts")
    whole = bank_from_moments(measure(features, y, radius=radius))
    assert bank.labels == whole.labels
    assert torch.equal(bank.count, whole.count)
    torch.testing.assert_close(bank.mean, whole.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bank.spread, whole.spread, rtol=1e-3, atol=3e-3)


def test_a_returning_class_can_be_replaced_and_others_do_not_change():
    old = bank_from_moments(measure(torch.tensor([[1.0, 0.0], [3.0, 4.0], [7.0, 7.0]]), torch.tensor([5, 5, 9])))
    fresh = measure(torch.tensor([[10.0, 20.0]]), torch.tensor([5]))
    bank = update(old, fresh, "replace")
    assert bank.labels == (5, 9)
    assert bank.count.tolist() == [1, 1]
    assert bank.mean.tolist() == [[10.0, 20.0], [7.0, 7.0]]
    merged = update(old, fresh, "counts")
    assert merged.count.tolist() == [3, 1]
    torch.testing.assert_close(merged.mean[0], torch.tensor([14 / 3, 8.0]))  # (1 + 3 + 10) / 3, (0 + 4 + 20) / 3


@pytest.mark.parametrize("radius", [False, True])
def test_a_class_with_one_sample_has_the_minimum_spread_and_no_nan(radius):
    bank = bank_from_moments(measure(torch.full((3, 4), 1e3), torch.tensor([1, 2, 2]), radius=radius))
    torch.testing.assert_close(bank.spread, torch.full_like(bank.spread, FLOOR**0.5))


def test_an_empty_bank_can_be_updated():
    fresh = measure(torch.ones(2, 3), torch.tensor([4, 4]))
    assert update(empty_bank(torch.zeros(3), 3), fresh).labels == (4,)
    assert len(empty_bank(torch.zeros(3), 1)) == 0


def test_transport_moves_means_and_nothing_else():
    features = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    bank = bank_from_moments(measure(features, torch.tensor([1, 1, 1, 7, 7, 7])))
    shift = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    moved = bank.shifted(shift)
    torch.testing.assert_close(moved.mean, bank.mean + shift)
    assert moved.spread is bank.spread
    assert moved.count is bank.count
