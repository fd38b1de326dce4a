"""Closed forms from sums equal those from all data, and a linear drift is recovered exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import Failure
from profcil.memory import linear, linear_drift, symmetric


def data(seed: int = 0, n: int = 90, d: int = 5, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=rng) * 3 + 1  # class ids with gaps
    shape = torch.randn(d, d, generator=rng)
    return torch.randn(n, d, generator=rng) @ shape + y[:, None] * torch.randn(d, generator=rng), y


def by_clients(u: torch.Tensor, y: torch.Tensor, cuts: int = 4) -> linear.Summary:
    """The pooled summary of the same examples, split into parts of different classes and sizes."""
    owner = (torch.arange(len(y)) * 7 + y) % cuts
    return linear.pool([linear.summarise(u[owner == c], y[owner == c]) for c in range(cuts)])


def lda_of_all(u: np.ndarray, y: np.ndarray, shrink: float) -> tuple[np.ndarray, np.ndarray]:
    means = np.stack([u[y == label].mean(0) for label in np.unique(y)])
    rest = u - means[np.searchsorted(np.unique(y), y)]
    cov = rest.T @ rest / len(u)
    weight = np.linalg.solve(cov + shrink * np.trace(cov) / len(cov) * np.eye(len(cov)), means.T).T
    return weight, -0.5 * (weight * means).sum(1)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.floats(0.01, 2.0))
def test_lda_of_pooled_summaries_equals_lda_of_all_data(seed, cuts, shrink):
    u, y = data(seed)
    weight, bias = linear.lda(by_clients(u, y, cuts), shrink)
    expected = lda_of_all(u.double().numpy(), y.numpy(), shrink)
    np.testing.assert_allclose(weight.numpy(), expected[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(bias.numpy(), expected[1], rtol=1e-6, atol=1e-9)


def test_the_last_features_are_shrunk_by_their_own_mean_variance():
    """With `last`, the unit of the last features does not matter; without it, it does."""
    u, y = data()
    small = torch.cat([u[:, :3], u[:, 3:] / 1000], 1)
    for last, equal in ((2, True), (0, False)):
        weight, bias = linear.lda(linear.summarise(u, y), 0.3, last)
        small_weight, small_bias = linear.lda(linear.summarise(small, y), 0.3, last)
        scores = u.double() @ weight.T + bias
        small_scores = small.double() @ small_weight.T + small_bias
        assert torch.allclose(scores, small_scores, rtol=1e-4, atol=1e-4) == equal


def test_a_summary_has_counts_and_class_ids():
    s = linear.summarise(torch.eye(6), torch.tensor([7, 7, 2, 2, 2, 9]))
    assert (s.labels, s.count.tolist()) == ((2, 7, 9), [3, 2, 1])
    assert float(s.gram[-1, -1]) == 6
    assert s.mean[1].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    empty = linear.summarise(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
    assert (empty.labels, empty.mean.shape, empty.gram.shape) == ((), (0, 6), (7, 7))


def test_support_is_counted_by_class():
    y = torch.tensor([7, 2, 7, 2, 2, 9])
    assert linear.support_mask(y, 2).tolist() == [True, True, True, True, True, False]
    assert linear.support_mask(y, 3).tolist() == [False, True, False, True, True, False]
    assert linear.support_mask(y[:0], 1).tolist() == []


def test_without_spread_the_head_is_the_nearest_mean():
    u = torch.tensor([[1.0, 0.0], [0.0, 3.0], [-2.0, 1.0]])
    weight, bias = linear.lda(linear.summarise(u, torch.tensor([0, 1, 2])), 0.3)
    probe = torch.randn(50, 2, generator=torch.Generator().manual_seed(0))
    assert torch.isfinite(weight).all()
    assert torch.equal((probe.double() @ weight.T + bias).argmax(1), torch.cdist(probe, u).argmin(1))


def drift(old: torch.Tensor, change: torch.Tensor) -> linear_drift.Drift:
    """The sums over some examples, computed directly."""
    u = linear.append_one(old)
    change = change.double()
    return linear_drift.Drift(u.T @ u, u.T @ change, change.T @ change)


def drifted(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, linear_drift.Drift, torch.Tensor, torch.Tensor]:
    """Old examples with labels, the drift of other examples, and the true linear map a, b of that drift."""
    rng = torch.Generator().manual_seed(seed)
    a = torch.eye(5) + 0.5 * torch.randn(5, 5, generator=rng)
    b = torch.randn(5, generator=rng)
    old, y = data(seed)
    other, _ = data(seed + 1)
    other = other.double()
    return old, y, drift(other, other @ a.double() + b - other), a, b


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_an_exact_linear_drift_is_recovered_for_means_and_matrix(seed):
    old, y, moved, a, b = drifted(seed)
    shift, residual = linear_drift.fit_drift(moved, 0.0)
    found = linear_drift.apply_drift(linear.summarise(old, y), shift, residual)
    truth = linear.summarise(old.double() @ a.double() + b, y)
    torch.testing.assert_close(found.mean, truth.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.gram, truth.gram, rtol=1e-5, atol=1e-3)
    assert float(residual.abs().max()) < 1e-6


def test_the_map_is_shrunk_towards_no_drift():
    _, _, moved, *_ = drifted()
    sizes = [float(linear_drift.fit_drift(moved, ridge)[0].norm()) for ridge in (0.0, 0.1, 10.0, 1e6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-4 * sizes[0]


def test_the_residual_of_the_linear_map_is_added_to_the_covariance():
    u, y = data()
    rng = torch.Generator().manual_seed(3)
    noise = torch.randn(4000, 5, generator=rng)
    before = torch.randn(4000, 5, generator=rng)
    shift, residual = linear_drift.fit_drift(drift(before, 2 * noise), 0.0)
    torch.testing.assert_close(residual, 4 * torch.eye(5).double(), atol=0.4, rtol=0)
    start = linear.summarise(u, y)
    wider = linear_drift.apply_drift(start, torch.zeros_like(shift), residual)
    torch.testing.assert_close(linear.within_class_covariance(wider), linear.within_class_covariance(start) + residual)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_a_transported_matrix_stays_symmetric_and_positive_semidefinite(seed, ridge):
    u, y = data(seed, n=12, d=8)  # the covariance within classes does not have full rank
    rng = torch.Generator().manual_seed(seed)
    before = torch.randn(30, 8, generator=rng)
    after = before.relu() + 0.3 * torch.randn(30, 8, generator=rng)
    s = linear.summarise(u, y)
    for _ in range(3):
        s = linear_drift.apply_drift(s, *linear_drift.fit_drift(drift(before, after - before), ridge))
    assert torch.equal(s.gram, s.gram.T)
    assert float(s.gram[-1, -1]) == pytest.approx(12)
    for matrix in (s.gram, linear.within_class_covariance(s)):
        values = torch.linalg.eigvalsh(matrix)
        assert float(values[0]) >= -1e-9 * float(values[-1])


def test_the_solver_uses_float64_and_adds_jitter_to_an_indefinite_matrix():
    rng = torch.Generator().manual_seed(0)
    thin = torch.randn(6, 3, generator=rng).double()
    flat = thin @ thin.T  # rank 3 of 6
    flat -= 1e-12 * torch.eye(6)
    assert int(torch.linalg.cholesky_ex(flat)[1])
    right = flat @ torch.randn(6, 2, generator=rng).double()
    answer = symmetric.solve(flat.float().double(), right.float())
    assert answer.dtype == torch.float64
    torch.testing.assert_close(flat @ answer, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("matrix", "word"),
    [
        (torch.diag(torch.tensor([1.0, -1.0, 1.0])), "positive definite"),
        (torch.full((3, 3), float("nan")), "NaN or infinite"),
    ],
)
def test_an_unsolvable_matrix_is_an_error(matrix, word):
    with pytest.raises(Failure, match=word):
        symmetric.solve(matrix, torch.ones(3, 1))


@pytest.mark.parametrize("size", [1, 2, 65, 513, 1100])
def test_packing_stores_a_triangle_in_float32(size):
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    matrix = symmetric.symmetrise(drawn)
    assert torch.equal(matrix, (drawn + drawn.T) / 2)
    packed = symmetric.pack(matrix.double())
    assert (packed.numel(), packed.dtype) == (size * (size + 1) // 2, torch.float32)
    assert torch.equal(symmetric.unpack(packed), matrix.double())


def test_pooling_does_not_depend_on_order_and_works_for_disjoint_classes():
    u, y = data()
    parts = [linear.summarise(u[y == label], y[y == label]) for label in torch.unique(y)]
    whole = linear.summarise(u, y)
    forward = linear.pool(parts)
    for s in (forward, linear.pool(parts[::-1])):
        assert s.labels == whole.labels
        torch.testing.assert_close(s.mean, whole.mean)
        torch.testing.assert_close(s.gram, whole.gram)
    assert forward.count.tolist() == whole.count.tolist()


@pytest.mark.parametrize(("size", "tile"), [(1, 4), (7, 4), (8, 4), (9, 512)])
def test_a_packed_gram_equals_the_packed_full_matrix(monkeypatch, size, tile):
    monkeypatch.setattr(symmetric, "TILE", tile)
    u = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).double()
    packed = symmetric.packed_gram(u)
    assert packed.dtype == torch.float32
    torch.testing.assert_close(packed, symmetric.pack(u.T @ u), rtol=1e-6, atol=1e-7)


# -- the packed factor --------------------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(0, 30), st.integers(1, 20))  # examples and features, either may be more


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(0, 1000))
def test_a_packed_factor_has_the_second_moments_of_its_examples(size, seed):
    u = 10 * torch.randn(size, generator=torch.Generator().manual_seed(seed)).double()
    packed = symmetric.packed_factor(u)
    assert packed.dtype == torch.float32
    gram = symmetric.gram_of_factor(packed, size[1])
    assert gram.dtype == torch.float64
    torch.testing.assert_close(gram, u.T @ u, rtol=1e-5, atol=1e-5 * float(u.square().sum() + 1))


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_a_packed_factor_has_as_many_rows_as_examples_but_at_most_as_features(size):
    examples, width = size
    rows = min(examples, width)
    packed = symmetric.packed_factor(torch.ones(size))
    assert packed.numel() == rows * width - rows * (rows - 1) // 2
    assert symmetric.factor_rows(packed.numel(), width) == rows


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 25_000), st.floats(0.0, 1.0))
def test_the_rows_of_a_packed_factor_follow_from_its_numbers(width, share):
    rows = round(share * width)
    assert symmetric.factor_rows(rows * width - rows * (rows - 1) // 2, width) == rows


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 8))
def test_a_packed_factor_reveals_nothing_beyond_the_second_moments(seed, examples):
    """Examples with the same second moments, and with them any rotation of the examples, have the same factor up to
    signs of its rows."""
    rng = torch.Generator().manual_seed(seed)
    u = torch.randn(examples, 10, generator=rng).double()
    rotation = torch.linalg.qr(torch.randn(examples, examples, generator=rng).double()).Q
    one, two = (symmetric.packed_factor(v) for v in (u, rotation @ u))
    torch.testing.assert_close(one.abs(), two.abs(), rtol=1e-3, atol=1e-3)


def test_the_factor_of_examples_that_are_alike_has_their_second_moments():
    """The matrix has rank 1; a Cholesky factor would not exist."""
    u = torch.arange(1.0, 7.0).double().expand(4, 6)
    torch.testing.assert_close(symmetric.gram_of_factor(symmetric.packed_factor(u), 6), u.T @ u, rtol=1e-5, atol=1e-4)


# -- the drift in a summary ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 4), st.integers(0, 3))
def test_the_drift_of_a_summary_equals_a_direct_computation(seed, anchors, others):
    rng = torch.Generator().manual_seed(seed)
    before, after, anchor, other = (torch.randn(20, d, generator=rng).double() for d in (3, 3, anchors, others))
    z = torch.cat([after, anchor, other, after - before], 1)
    summary = linear.summarise(z, torch.arange(20) % 2)
    kept = summary.gram.clone()
    found = linear_drift.drift_of(summary, anchors, 3)
    expected = drift(torch.cat([before, anchor], 1), after - before)
    torch.testing.assert_close(found.old, expected.old)
    torch.testing.assert_close(found.cross, expected.cross)
    torch.testing.assert_close(found.square, expected.square)
    assert torch.equal(summary.gram, kept)  # the summary is not changed


def test_pooling_does_not_change_its_parts():
    rng = torch.Generator().manual_seed(0)
    parts = [linear.summarise(torch.randn(4, 3, generator=rng), torch.tensor([0, 0, c, c])) for c in (1, 2, 3)]
    before = [p.gram.clone() for p in parts]
    whole = linear.pool(parts)
    assert torch.allclose(whole.gram, sum(before)) and whole.labels == (0, 1, 2, 3)
    assert all(torch.equal(p.gram, b) for p, b in zip(parts, before, strict=True))
    rounded = linear.pool([linear.Summary(p.labels, p.count, p.mean, p.gram.float()) for p in parts])
    assert rounded.gram.dtype == torch.float64  # summed in float64, though each part was rounded


def test_the_drift_sums_are_in_the_second_moments_of_both_features():
    rng = torch.Generator().manual_seed(3)
    before, after = (torch.randn(9, 4, generator=rng) for _ in range(2))
    rows = linear_drift.drift_rows(before, after)
    found = linear_drift.split_drift(rows.T @ rows, 4)
    expected = drift(before, after - before)
    for name in ("old", "cross", "square"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("varying", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_lda_where_features_do_not_vary_within_classes(varying, seed):
    """As those of equal inputs: what is left of their covariance is the rounding of reports, and may be negative."""
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(40) % 4
    fixed = torch.nn.functional.normalize(torch.rand(4, 12, generator=rng), dim=1)[y]
    moving = torch.rand(4, 60, generator=rng)[y] + varying * torch.randn(40, 60, generator=rng)
    z = torch.cat([moving, fixed], 1)
    summary = linear.summarise(z, y)
    rounded = replace(summary, gram=summary.gram.float().double(), mean=summary.mean.float().double())
    weight, bias = linear.lda(rounded, 1.0, 12)
    assert torch.equal((z.double() @ weight.T + bias).argmax(1), y)
