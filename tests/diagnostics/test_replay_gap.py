"""The distances against slow or external implementations, and on examples with a known result."""

from __future__ import annotations

from itertools import combinations, permutations
from math import exp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics.pairwise import rbf_kernel

from profcil.diagnostics import replay_gap as gap
from profcil.errors import DataError


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


fast = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 999)
widths = st.integers(1, 4)
sizes = st.integers(2, 6)


@fast
@given(seeds, widths, sizes, sizes, st.sampled_from([0.3, 1.0, 4.0]))
def test_mmd_equals_the_double_sums_of_the_paper(seed, width, n, m, sigma) -> None:
    a = normal(seed, n, width)
    b = 1 + normal(seed + 1000, m, width)

    def k(x: torch.Tensor, y: torch.Tensor) -> float:
        return exp(-sum((p - q) ** 2 for p, q in zip(x.tolist(), y.tolist(), strict=True)) / (2 * sigma**2))

    first = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    second = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    cross = sum(k(x, y) for x in a for y in b) / (n * m)
    assert gap.mmd2(a, b, sigma) == pytest.approx(first + second - 2 * cross, abs=1e-12)


def test_mmd_agrees_with_sklearns_kernel_in_many_dimensions() -> None:
    a = normal(0, 40, 64)
    b = 0.3 + normal(1, 30, 64)
    both = torch.cat([a, b]).numpy()
    sigma = gap.median_bandwidth(a, b)
    k = rbf_kernel(both, gamma=1 / (2 * sigma**2))
    np.fill_diagonal(k, 0)
    expected = k[:40, :40].sum() / (40 * 39) + k[40:, 40:].sum() / (30 * 29) - 2 * k[:40, 40:].mean()
    assert gap.mmd2(a, b) == pytest.approx(expected, abs=1e-12)


def test_mmd_is_unbiased_for_small_samples() -> None:
    """Six samples per side of one distribution: the mean over draws is 0; a biased estimate would be near 0.2."""
    values = np.array([gap.mmd2(normal(2 * s, 6, 3), normal(2 * s + 1, 6, 3), 1.5) for s in range(600)])
    assert abs(values.mean()) < 4 * values.std() / len(values) ** 0.5 < 0.03
    assert values.min() < 0 < values.max()


def test_mmd_of_two_gaussians_is_the_closed_form() -> None:
    """N(0, 1) and N(2, 1) with an RBF kernel of width s: 2 s / sqrt(s^2 + 2) x (1 - exp(-4 / (2 (s^2 + 2))))."""
    s = 1.3
    expected = 2 * s / (s**2 + 2) ** 0.5 * (1 - exp(-4 / (2 * (s**2 + 2))))
    assert gap.mmd2(normal(0, 2000, 1), 2 + normal(1, 2000, 1), s) == pytest.approx(expected, abs=0.03)


def test_the_bandwidth_is_the_median_distance_of_distinct_points() -> None:
    a = torch.tensor([[0.0], [1.0], [3.0]])
    assert gap.median_bandwidth(a) == 2.0  # distances 1, 2, 3
    assert gap.median_bandwidth(a, a[:1]) == 2.0  # without the pair at distance 0: 1, 1, 2, 3, 3
    assert gap.median_bandwidth(torch.ones(4, 2)) == 1.0
    points = normal(0, 6, 3)
    distances = [float((points[i] - points[j]).norm()) for i, j in combinations(range(6), 2)]
    assert gap.median_bandwidth(points[:2], points[2:]) == pytest.approx(float(np.median(distances)))


def test_collapsed_replay_has_a_large_mmd_and_identical_points_have_none() -> None:
    real = normal(0, 50, 4)
    collapsed = real.mean(0).expand(50, 4)
    assert gap.mmd2(real, collapsed) > 0.1 > gap.mmd2(real[:25], real[25:])
    assert gap.mmd2(torch.ones(5, 2), torch.ones(4, 2)) == pytest.approx(0)


@fast
@given(seeds, widths, st.integers(1, 5))
def test_w1_is_the_minimum_over_all_assignments(seed, width, n) -> None:
    a = normal(seed, n, width)
    b = normal(seed + 1000, n, width)
    best = min(sum(float((a[i] - b[j]).norm()) for i, j in enumerate(p)) / n for p in permutations(range(n)))
    assert gap.w1(a, b) == pytest.approx(best)


@fast
@given(seeds, st.integers(1, 40))
def test_w1_in_one_dimension_agrees_with_scipy(seed, n) -> None:
    a = normal(seed, n, 1)
    b = 2 * normal(seed + 1000, n, 1)
    assert gap.w1(a, b) == pytest.approx(stats.wasserstein_distance(a[:, 0], b[:, 0]))


def test_w1_in_many_dimensions_agrees_with_pot() -> None:
    ot = pytest.importorskip("ot")
    a = normal(3, 40, 7)
    b = 1 + normal(4, 40, 7)
    cost = ot.dist(a.numpy(), b.numpy(), metric="euclidean")
    assert gap.w1(a, b) == pytest.approx(ot.emd2([], [], cost), rel=1e-9)


def test_w1_in_space_agrees_with_the_linear_programme_of_scipy() -> None:
    a = normal(0, 12, 3)
    b = 1 + normal(1, 12, 3)
    assert gap.w1(a, b) == pytest.approx(stats.wasserstein_distance_nd(a.numpy(), b.numpy()))


@fast
@given(seeds, widths, st.integers(1, 30), st.floats(-5, 5))
def test_w1_of_a_shifted_copy_is_the_length_of_the_shift(seed, width, n, by) -> None:
    a = normal(seed, n, width)
    shuffled = a[torch.from_numpy(np.random.default_rng(seed).permutation(n))]
    assert gap.w1(a, shuffled + by) == pytest.approx(abs(by) * width**0.5, abs=1e-9)


@fast
@given(seeds, st.integers(1, 12), st.integers(1, 12))
def test_sliced_w1_in_one_dimension_is_w1_for_any_sizes(seed, n, m) -> None:
    a = normal(seed, n, 1)
    b = normal(seed + 1000, m, 1)
    expected = stats.wasserstein_distance(a[:, 0], b[:, 0])
    assert gap.sliced_w1(a, b, seed=0, directions=3) == pytest.approx(expected)


def test_sliced_w1_of_a_shifted_copy_is_the_shift_times_the_mean_cosine() -> None:
    """In the plane the mean of |cos| over all directions is 2 / pi; in space it is 1 / 2."""
    flat = normal(0, 30, 2)
    deep = normal(0, 30, 3)
    assert gap.sliced_w1(flat, flat + torch.tensor([3.0, 4.0]), 0, 20_000) == pytest.approx(10 / np.pi, rel=0.02)
    assert gap.sliced_w1(deep, deep + torch.tensor([0.0, 3.0, 4.0]), 0, 20_000) == pytest.approx(2.5, rel=0.02)


@fast
@given(seeds, widths, st.integers(1, 8))
def test_sliced_w1_is_never_above_w1(seed, width, n) -> None:
    a = normal(seed, n, width)
    b = normal(seed + 1000, n, width)
    assert gap.sliced_w1(a, b, seed) <= gap.w1(a, b) + 1e-12


def test_sliced_w1_depends_on_its_seed_and_not_on_the_global_random_state() -> None:
    a = normal(0, 9, 5)
    b = normal(1, 7, 5)
    torch.manual_seed(0)
    one = gap.sliced_w1(a, b, 1)
    torch.manual_seed(1)
    assert one == gap.sliced_w1(a, b, 1) != gap.sliced_w1(a, b, 2)


def test_cosine_distance_of_small_examples() -> None:
    east = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    north = torch.tensor([[0.0, 5.0]])
    assert gap.cosine_distance(east, north) == pytest.approx(1)
    assert gap.cosine_distance(east, 7 * east) == pytest.approx(0)
    assert gap.cosine_distance(east, -east) == pytest.approx(2)
    assert gap.cosine_distance(torch.tensor([[4.0, -1.0], [0.0, 1.0]]), east) == pytest.approx(
        0
    )  # the distance is between means
    assert gap.cosine_distance(east, torch.zeros(3, 2)) == 1


@fast
@given(seeds)
def test_distances_are_symmetric_and_invariant_to_sample_order_and_rotation(seed) -> None:
    a = normal(seed, 7, 4)
    b = 0.5 + normal(seed + 1000, 7, 4)
    rotation = torch.linalg.qr(normal(seed + 2000, 4, 4)).Q
    for distance in (gap.mmd2, gap.w1, gap.cosine_distance):
        expected = pytest.approx(distance(a, b), abs=1e-9)
        assert distance(b, a) == expected
        assert distance(a.flip(0), b) == expected
        assert distance(a @ rotation, b @ rotation) == expected
    for distance in (gap.mmd2, gap.w1):
        assert distance(a + 3, b + 3) == pytest.approx(distance(a, b), abs=1e-9)
    assert gap.w1(5 * a, 5 * b) == pytest.approx(5 * gap.w1(a, b))
    assert gap.mmd2(5 * a, 5 * b) == pytest.approx(
        gap.mmd2(a, b), abs=1e-9
    )  # the median bandwidth scales with the space


def test_the_gap_names_the_distances_it_contains(monkeypatch) -> None:
    a = normal(0, 12, 3)
    b = normal(1, 12, 3).float()
    found = gap.replay_gap(a, b, seed=0)
    assert found["w1"] == gap.w1(a, b) and "sliced_w1" not in found
    assert found["mmd2"] == gap.mmd2(a, b) and found["bandwidth"] == gap.median_bandwidth(a, b)
    assert (found["real"], found["replay"]) == (12, 12) and found["cosine"] == gap.cosine_distance(a, b)
    assert gap.replay_gap(a, b, 0, bandwidth=0.7)["mmd2"] == gap.mmd2(a, b, 0.7) != found["mmd2"]
    assert gap.replay_gap(a, b[:5], 0)["sliced_w1"] == gap.sliced_w1(a, b[:5], 0)
    monkeypatch.setattr(gap, "EXACT_UP_TO", 11)
    assert "w1" not in gap.replay_gap(a, b, 0)


def test_the_downstream_drop_of_small_examples() -> None:
    assert gap.downstream_drop([0.9, 0.8, 0.6, 0.4], [0.1, 0.2, 0.5, 0.1], task=1) == pytest.approx(0.2)
    assert gap.downstream_drop([1.0, 0.5], [0.0, 0.7], task=0) == pytest.approx(-0.2)
    for task in (-1, 1, 2):
        with pytest.raises(DataError, match="before the last"):
            gap.downstream_drop([1.0, 0.5], [0.0, 0.7], task)


@fast
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=12), seeds)
def test_the_rank_correlation_agrees_with_scipy_for_ties(pairs, seed) -> None:
    x, y = zip(*pairs, strict=True)
    if len(set(x)) == 1 or len(set(y)) == 1:
        with pytest.raises(DataError, match="neither constant"):
            gap.rank_correlation(x, y, seed)
        return
    found = gap.rank_correlation(x, y, seed, draws=50)
    assert found.rho == pytest.approx(stats.spearmanr(x, y).statistic)
    assert -1 - 1e-12 <= found.low <= found.high <= 1 + 1e-12


def test_only_ranks_matter_and_a_monotone_relation_has_correlation_one() -> None:
    x = np.arange(9.0)
    assert gap.rank_correlation(x, np.exp(x), 0) == pytest.approx((1, 1, 1))
    assert gap.rank_correlation(x, -(x**3), 0) == pytest.approx((-1, -1, -1))


def test_the_interval_agrees_with_the_percentile_bootstrap_of_scipy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=40)
    y = x + rng.normal(size=40)
    found = gap.rank_correlation(x, y, 0, draws=4000)

    def rho(a, b, axis=-1):
        ranks = (stats.rankdata(v, axis=axis) for v in (a, b))
        u, v = (r - r.mean(axis, keepdims=True) for r in ranks)
        return (u * v).sum(axis) / np.sqrt((u**2).sum(axis) * (v**2).sum(axis))

    options = {"paired": True, "vectorized": True, "n_resamples": 4000, "method": "percentile"}
    expected = stats.bootstrap((x, y), rho, **options, rng=np.random.default_rng(1)).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.03)
    narrow = gap.rank_correlation(x, y, 0, level=0.5)
    assert found.low < narrow.low < found.rho < narrow.high < found.high


def test_the_interval_covers_zero_correlation_at_about_its_level() -> None:
    covered = 0
    for s in range(150):
        x, y = np.random.default_rng(s).normal(size=(2, 25))
        _, low, high = gap.rank_correlation(x, y, s, draws=300)
        covered += low <= 0 <= high
    assert 0.87 <= covered / 150 <= 1


def test_the_bootstrap_depends_on_its_seed() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 12))
    assert gap.rank_correlation(x, y, 1) == gap.rank_correlation(x, y, 1)
    assert gap.rank_correlation(x, y, 1)[1:] != gap.rank_correlation(x, y, 2)[1:]


@pytest.mark.parametrize("bad", [torch.ones(3), torch.ones(3, 5), torch.ones(0, 4), torch.full((3, 4), float("nan"))])
def test_features_that_cannot_be_compared_are_refused(bad) -> None:
    good = normal(0, 3, 4)
    for call in (gap.mmd2, gap.w1, gap.cosine_distance, lambda a, b: gap.sliced_w1(a, b, 0)):
        for pair in ((good, bad), (bad, good)):
            with pytest.raises(DataError, match=r"features (have|contain)"):
                call(*pair)


def test_errors_say_what_to_do() -> None:
    a = normal(0, 3, 4)
    with pytest.raises(DataError, match="use sliced_w1"):
        gap.w1(a, a[:2])
    with pytest.raises(DataError, match="at least 2 samples"):
        gap.mmd2(a, a[:1])
    with pytest.raises(DataError, match="leave it out for the median rule"):
        gap.mmd2(a, a, bandwidth=0.0)
    with pytest.raises(DataError, match="directions is 0"):
        gap.sliced_w1(a, a, 0, directions=0)
    for x, y in (([1, 2], [1, 2]), ([1, 2, 3], [1, 2]), ([1, 2, float("nan")], [1, 2, 3])):
        with pytest.raises(DataError, match="at least 3"):
            gap.rank_correlation(x, y, 0)
