"""Closed forms from sums equal those from all the data, and a linear drift is followed exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.errors import Failure
from profcil.memory import linear


def data(seed: int = 0, n: int = 90, d: int = 5, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=rng) * 3 + 1  # class ids with gaps
    shape = torch.randn(d, d, generator=rng)
    return torch.randn(n, d, generator=rng) @ shape + y[:, None] * torch.randn(d, generator=rng), y


def by_clients(u: torch.Tensor, y: torch.Tensor, cuts: int = 4) -> linear.Summary:
    """The same examples, measured in parts of different classes and sizes."""
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
def test_pooled_lda_is_the_lda_of_all_data(seed, cuts, shrink):
    u, y = data(seed)
    weight, bias = linear.lda(by_clients(u, y, cuts), shrink)
    expected = lda_of_all(u.double().numpy(), y.numpy(), shrink)
    np.testing.assert_allclose(weight.numpy(), expected[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(bias.numpy(), expected[1], rtol=1e-6, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.floats(0.0, 2.0))
def test_pooled_ridge_is_the_ridge_of_all_data(seed, cuts, strength):
    u, y = data(seed)
    weight, bias = linear.ridge(by_clients(u, y, cuts), strength)
    x = u.double().numpy()
    a, target = np.c_[x, np.ones(len(x))], (y.numpy()[:, None] == np.unique(y.numpy())).astype(float)
    penalty = strength * len(x) * x.var(0).mean() * np.diag([1.0] * x.shape[1] + [0.0])
    expected = np.linalg.solve(a.T @ a + penalty, a.T @ target)
    np.testing.assert_allclose(weight.numpy(), expected[:-1].T, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(bias.numpy(), expected[-1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", [linear.lda, linear.ridge])
def test_features_of_another_scale_are_shrunk_by_their_own(form):
    """Said apart, it does not matter in which unit the last features are measured; otherwise it does."""
    u, y = data()
    small = torch.cat([u[:, :3], u[:, 3:] / 1000], 1)
    for apart, alike in ((2, True), (0, False)):
        (w, b), (v, c) = (form(linear.summarise(x, y), 0.3, apart) for x in (u, small))
        scores, others = u.double() @ w.T + b, small.double() @ v.T + c
        assert torch.allclose(scores, others, rtol=1e-4, atol=1e-4) == alike


def test_a_summary_counts_and_keeps_class_ids():
    s = linear.summarise(torch.eye(6), torch.tensor([7, 7, 2, 2, 2, 9]))
    assert (s.labels, s.count.tolist()) == ((2, 7, 9), [3, 2, 1])
    assert float(s.gram[-1, -1]) == 6
    assert s.mean[1].tolist() == [0.5, 0.5, 0, 0, 0, 0]
    nobody = linear.summarise(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))
    assert (nobody.labels, nobody.mean.shape, nobody.gram.shape) == ((), (0, 6), (7, 7))


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


def drifted(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, linear.Drift, torch.Tensor, torch.Tensor]:
    """Old examples that nobody has any more, their true features now, and the drift of others."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.eye(5) + 0.5 * torch.randn(5, 5, generator=rng), torch.randn(5, generator=rng)
    (old, y), (other, _) = data(seed), data(seed + 1)
    halves = [linear.measure_drift(part.double(), part.double() @ a.double() + b) for part in other.split(40)]
    return old, y, linear.pool_drift(halves), a, b


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_an_exact_linear_drift_is_recovered_for_means_and_matrix(seed):
    old, y, moved, a, b = drifted(seed)
    shift, residual = linear.fit_drift(moved, 0.0)
    found = linear.apply_drift(linear.summarise(old, y), shift, residual)
    truth = linear.summarise(old.double() @ a.double() + b, y)
    torch.testing.assert_close(found.mean, truth.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.gram, truth.gram, rtol=1e-5, atol=1e-3)
    assert float(residual.abs().max()) < 1e-6


def test_the_map_is_shrunk_towards_no_drift():
    _, _, moved, *_ = drifted()
    sizes = [float(linear.fit_drift(moved, ridge)[0].norm()) for ridge in (0.0, 0.1, 10.0, 1e6)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-4 * sizes[0]


def test_what_no_map_explains_widens_the_classes():
    (u, y), rng = data(), torch.Generator().manual_seed(3)
    noise = torch.randn(4000, 5, generator=rng)
    before = torch.randn(4000, 5, generator=rng)
    shift, residual = linear.fit_drift(linear.measure_drift(before, before + 2 * noise), 0.0)
    torch.testing.assert_close(residual, 4 * torch.eye(5).double(), atol=0.4, rtol=0)
    start = linear.summarise(u, y)
    wider = linear.apply_drift(start, torch.zeros_like(shift), residual)
    torch.testing.assert_close(linear.within_class_covariance(wider), linear.within_class_covariance(start) + residual)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(0.0, 1.0))
def test_a_moved_matrix_stays_symmetric_and_positive(seed, ridge):
    (u, y), rng = data(seed, n=12, d=8), torch.Generator().manual_seed(seed)  # not of full rank within classes
    before = torch.randn(30, 8, generator=rng)
    after = before.relu() + 0.3 * torch.randn(30, 8, generator=rng)
    s = linear.summarise(u, y)
    for _ in range(3):
        s = linear.apply_drift(s, *linear.fit_drift(linear.measure_drift(before, after), ridge))
    assert torch.equal(s.gram, s.gram.T)
    assert float(s.gram[-1, -1]) == pytest.approx(12)
    for matrix in (s.gram, linear.within_class_covariance(s)):
        values = torch.linalg.eigvalsh(matrix)
        assert float(values[0]) >= -1e-9 * float(values[-1])


def test_displaced_means_keep_their_scatter():
    u, y = data()
    s = linear.summarise(u, y)
    shift = torch.randn(len(s.labels), 5, generator=torch.Generator().manual_seed(1)).double()
    moved, truth = (
        linear.shift_means(s, shift),
        linear.summarise(u.double() + shift[torch.unique(y, return_inverse=True)[1]], y),
    )
    torch.testing.assert_close(moved.mean, truth.mean)
    torch.testing.assert_close(moved.gram, truth.gram)


def test_the_solver_works_in_float64_and_falls_back_where_rounding_made_a_matrix_indefinite():
    rng = torch.Generator().manual_seed(0)
    thin = torch.randn(6, 3, generator=rng).double()
    flat = thin @ thin.T  # rank 3 of 6
    flat -= 1e-12 * torch.eye(6)
    assert int(torch.linalg.cholesky_ex(flat)[1])
    right = flat @ torch.randn(6, 2, generator=rng).double()
    answer = linear.solve(flat.float().double(), right.float())
    assert answer.dtype == torch.float64
    torch.testing.assert_close(flat @ answer, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("matrix", "word"),
    [
        (torch.diag(torch.tensor([1.0, -1.0, 1.0])), "positive definite"),
        (torch.full((3, 3), float("nan")), "NaN or infinite"),
    ],
)
def test_a_hopeless_matrix_is_named(matrix, word):
    with pytest.raises(Failure, match=word):
        linear.solve(matrix, torch.ones(3, 1))


@pytest.mark.parametrize("size", [1, 2, 65, 513, 1100])
def test_packing_sends_a_triangle_and_loses_only_float32(size):
    drawn = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    matrix = linear.symmetrise(drawn)
    assert torch.equal(matrix, (drawn + drawn.T) / 2)
    packed = linear.pack(matrix.double())
    assert (packed.numel(), packed.dtype) == (size * (size + 1) // 2, torch.float32)
    assert torch.equal(linear.unpack(packed), matrix.double())


def test_pooling_is_the_same_in_any_order_and_for_disjoint_classes():
    u, y = data()
    parts = [linear.summarise(u[y == label], y[y == label]) for label in torch.unique(y)]
    one, two, whole = linear.pool(parts), linear.pool(parts[::-1]), linear.summarise(u, y)
    for s in (one, two):
        assert s.labels == whole.labels
        torch.testing.assert_close(s.mean, whole.mean)
        torch.testing.assert_close(s.gram, whole.gram)
    assert replace(one, gram=whole.gram).count.tolist() == whole.count.tolist()


@pytest.mark.parametrize("size, tile", [(1, 4), (7, 4), (8, 4), (9, 512)])
def test_moments_that_are_packed_as_they_are_made_are_those_of_the_whole_matrix(monkeypatch, size, tile):
    monkeypatch.setattr(linear, "TILE", tile)
    u, y = torch.randn(5, size, generator=torch.Generator().manual_seed(size)), torch.tensor([3, 1, 3, 1, 1])
    whole, made = linear.summarise(u, y), linear.summarise(u, y, packed=True)
    assert made.labels == whole.labels and torch.equal(made.mean, whole.mean)
    assert made.gram.dtype == torch.float32 and torch.allclose(made.gram, linear.pack(whole.gram), rtol=1e-6)
    assert torch.allclose(linear.unpack(made.gram), whole.gram, rtol=1e-6)
    whole, made = (linear.measure_drift(u, u.flip(0)[:, :1], packed=packed) for packed in (False, True))
    assert torch.equal(made.cross, whole.cross)
    assert all(
        torch.allclose(a, linear.pack(b), rtol=1e-6) for a, b in ((made.old, whole.old), (made.square, whole.square))
    )


def test_pooling_changes_none_of_its_parts():
    rng = torch.Generator().manual_seed(0)
    parts = [linear.summarise(torch.randn(4, 3, generator=rng), torch.tensor([0, 0, c, c])) for c in (1, 2, 3)]
    before = [p.gram.clone() for p in parts]
    whole = linear.pool(parts)
    assert torch.allclose(whole.gram, sum(before)) and whole.labels == (0, 1, 2, 3)
    assert all(torch.equal(p.gram, b) for p, b in zip(parts, before, strict=True))
    packed = linear.pool([linear.Summary(p.labels, p.count, p.mean, linear.pack(p.gram)) for p in parts])
    assert packed.gram.dtype == torch.float64  # added up in full, though each was rounded
