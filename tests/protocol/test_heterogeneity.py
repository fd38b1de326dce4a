from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import ConfigError
from profcil.protocol import heterogeneity as h
from profcil.protocol.allocation import share_sizes
from profcil.randomness import generator

fast = settings(max_examples=40, deadline=None)
fractions = st.integers(0, 20).map(lambda n: n / 20)
seeds = st.integers(0, 1000)


def test_halves_are_rounded_up() -> None:
    assert [h.round_half_up(x) for x in (0.0, 0.49, 0.5, 1.5, 2.5, 3.4)] == [0, 0, 1, 2, 3, 3]
    assert h.share_of(0.0, 7) == 1


@fast
@given(st.integers(1, 40), fractions, fractions, seeds)
def test_support_is_exact_and_nested(clients: int, low: float, high: float, seed: int) -> None:
    low, high = sorted((low, high))
    small, large = (h.draw_supporters(clients, s, generator(seed, "s")) for s in (low, high))
    assert len(set(small.tolist())) == max(1, h.round_half_up(low * clients))
    assert set(small.tolist()) <= set(large.tolist()) <= set(range(clients))


def test_support_is_uniform() -> None:
    counts = Counter(c for s in range(2000) for c in h.draw_supporters(10, 0.4, generator(s, "s")).tolist())
    assert all(abs(counts[c] - 800) < 5 * (2000 * 0.4 * 0.6) ** 0.5 for c in range(10))


@fast
@given(st.integers(1, 30), st.integers(1, 12), fractions, seeds)
def test_coverage_is_balanced_and_complete(supporters: int, size: int, coverage: float, seed: int) -> None:
    random = generator(seed, "c")
    classes = tuple(range(50, 50 + size))
    quotas = h.draw_quotas(supporters, size, coverage, random)
    rows, assigned = h.assign_labels(quotas, classes, random)
    pairs = list(zip(rows.tolist(), assigned.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    assert [rows.tolist().count(r) for r in range(supporters)] == quotas.tolist()
    counts = [assigned.tolist().count(y) for y in classes]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 1


@fast
@given(st.integers(1, 30), st.integers(1, 12), fractions, seeds)
def test_quotas_are_raised_by_the_least_amount(supporters: int, size: int, coverage: float, seed: int) -> None:
    base = max(1, h.round_half_up(coverage * size))
    quotas = h.draw_quotas(supporters, size, coverage, generator(seed, "q"))
    assert quotas.sum() == max(size, supporters * base)
    assert quotas.max() - quotas.min() <= 1
    assert h.missing_labels(supporters, size, coverage) == quotas.sum() - supporters * base


def test_every_label_subset_is_drawn() -> None:
    rows, labels = h.assign_labels(np.full(600, 2), (0, 1, 2, 3), generator(0, "c"))
    subsets = Counter(tuple(sorted(labels[rows == r].tolist())) for r in range(600))
    assert len(subsets) == 6
    assert min(subsets.values()) > 60


@fast
@given(st.integers(1, 20), st.integers(1, 12), fractions, seeds)
def test_derange_changes_exactly_the_drawn_positions(clients: int, tasks: int, disorder: float, seed: int) -> None:
    orders = h.derange(clients, tasks, disorder, generator(seed, "d"))
    drawn = h.round_half_up(disorder * tasks)
    assert (np.sort(orders, axis=1) == np.arange(tasks)).all()
    assert ((orders != np.arange(tasks)).sum(axis=1) == (drawn if drawn >= 2 else 0)).all()


def test_derangements_are_uniform() -> None:
    counts = Counter(map(tuple, h.derangements(9000, 4, generator(0, "d")).tolist()))
    assert len(counts) == 9  # the number of derangements of four elements
    assert all(abs(n - 1000) < 5 * 1000**0.5 for n in counts.values())


def test_drawn_positions_are_uniform() -> None:
    moved = (h.derange(5000, 8, 0.25, generator(0, "d")) != np.arange(8)).mean(axis=0)
    assert np.abs(moved - 0.25).max() < 0.035


def test_adjacent_swaps_neighbours_with_the_given_probability() -> None:
    assert (h.adjacent(3, 5, 0.0, generator(0, "a")) == np.arange(5)).all()
    assert h.adjacent(1, 5, 1.0, generator(0, "a")).tolist() == [[1, 2, 3, 4, 0]]
    pairs = h.adjacent(5000, 2, 0.3, generator(0, "a"))
    assert abs((pairs[:, 0] == 1).mean() - 0.3) < 0.035
    many = h.adjacent(200, 6, 0.5, generator(0, "a"))
    assert (np.sort(many, axis=1) == np.arange(6)).all()
    assert (np.arange(6) - many >= -1).all()  # a task moves at most one position forward


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown sampler 'derang'; did you mean derange"):
        h.draw_orders("derang", 2, 2, 0.5, generator(0, "d"))


@fast
@given(st.integers(0, 60), st.integers(1, 20), st.sampled_from([0.0, 1e-9, 0.1, 1.0, 1e6]), seeds)
def test_share_sizes_add_up(samples: int, owners: int, dirichlet: float, seed: int) -> None:
    parts = share_sizes(samples, owners, dirichlet, generator(seed, "n"))
    assert len(parts) == owners
    assert parts.sum() == samples
    assert parts.min() >= 0
    if dirichlet == 0:
        assert parts.max() - parts.min() <= 1


def test_a_small_concentration_gives_uneven_shares() -> None:
    spread = {a: share_sizes(10_000, 10, a, generator(0, "n")).std() for a in (0.1, 1.0, 1000.0)}
    assert spread[0.1] > spread[1.0] > spread[1000.0]
    assert spread[1000.0] < 100


def test_an_even_division_leaves_nothing_over() -> None:
    """Seven examples of a class among three owners are two, two and three, in any order."""
    assert {tuple(share_sizes(7, 3, 0.0, generator(seed, "n"))) for seed in range(20)} == {
        (2, 2, 3),
        (2, 3, 2),
        (3, 2, 2),
    }
