"""The rules on stacked vectors: order does not matter, equal vectors stay, a minority moves nothing far."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from profcil.robust.rules import COMBINED, geometric_median, krum_choice, median, shrinkage, trimmed_mean

sizes = st.integers(1, 12)
seeds = st.integers(0, 1000)


def drawn(n: int, seed: int, width: int = 5) -> torch.Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rule", COMBINED)
@given(n=sizes, seed=seeds)
def test_the_order_of_clients_does_not_matter(rule, n, seed):
    stack = drawn(n, seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(COMBINED[rule](stack), COMBINED[rule](stack[order]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", COMBINED)
@given(n=sizes, seed=seeds)
def test_equal_vectors_stay(rule, n, seed):
    one = drawn(1, seed)
    assert torch.allclose(COMBINED[rule](one.expand(n, -1)), one[0], rtol=0, atol=1e-12)


@given(n=st.integers(3, 12), seed=seeds, size=st.floats(-1e9, 1e9))
def test_a_minority_does_not_move_the_median_out_of_the_honest_range(n, seed, size):
    liars = (n - 1) // 2
    stack = drawn(n, seed)
    honest = stack[liars:]
    stack[:liars] = size
    found = median(stack)
    assert bool((found >= honest.amin(0)).all() and (found <= honest.amax(0)).all())


@given(n=st.integers(3, 12), seed=seeds, size=st.floats(-1e9, 1e9))
def test_a_fifth_does_not_move_the_trimmed_mean_out_of_the_honest_range(n, seed, size):
    liars = max(1, n // 5)
    stack = drawn(n, seed)
    honest = stack[liars:]
    stack[:liars] = size
    found = trimmed_mean(stack)
    assert bool((found >= honest.amin(0) - 1e-9).all() and (found <= honest.amax(0) + 1e-9).all())


@given(n=st.integers(3, 12), seed=seeds, size=st.floats(-1e6, 1e6))
def test_a_minority_moves_the_geometric_median_a_bounded_way(n, seed, size):
    """With a share a of liars, at most 2(1 − a)/(1 − 2a) times the distance of the furthest honest vector."""
    liars = (n - 1) // 2
    stack = drawn(n, seed)
    honest = stack[liars:]
    centre = honest.mean(0)
    furthest = float((honest - centre).norm(dim=1).max())
    stack[:liars] = size
    share = liars / n
    bound = 2 * (1 - share) / (1 - 2 * share) * furthest
    assert float((geometric_median(stack) - centre).norm()) <= 1.01 * bound


def test_the_geometric_median_is_nearest_to_all():
    stack = drawn(7, 3)
    stack[0] *= 20
    found = geometric_median(stack)

    def distances(point):
        return float((stack - point).norm(dim=1).sum())

    others = [stack.mean(0), median(stack), *(found + 0.01 * drawn(1, s)[0] for s in range(20))]
    assert all(distances(found) <= distances(other) + 1e-9 for other in others)


def test_with_half_of_the_vectors_false_the_median_breaks():
    stack = drawn(6, 0)
    stack[:3] = 1e9
    assert float(median(stack).max()) > 1e8


def test_the_median_of_an_even_number_is_the_middle():
    assert median(torch.tensor([[1.0], [2.0], [4.0], [100.0]])).item() == 3.0


def test_the_trimmed_mean_of_two_is_their_mean():
    assert trimmed_mean(torch.tensor([[1.0], [3.0]])).item() == 2.0


@given(n=st.integers(4, 12), seed=seeds)
def test_krum_leaves_out_a_far_vector(n, seed):
    stack = drawn(n, seed)
    stack[n // 2] += 1e4
    assert n // 2 not in krum_choice(stack)
    assert len(krum_choice(stack)) == n - max(1, n // 5)


def test_krum_keeps_two_vectors():
    assert krum_choice(torch.tensor([[0.0], [1e9]])) == [0, 1]


def test_shrinkage_brings_updates_to_the_radius_and_leaves_short_ones():
    assert shrinkage(torch.tensor([0.0, 1.0, 2.0, 8.0]), 2.0).tolist() == [1.0, 1.0, 1.0, 0.25]
