"""Products with sparse features against plain ones."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from profcil.accel.cpu import sparse_linear


def words(share: float, rows: int = 40, columns: int = 300) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    x = torch.rand(rows, columns, generator=rng)
    return x * (torch.rand(rows, columns, generator=rng) < share)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5])
def test_product_and_gradient_are_those_of_a_plain_product(share):
    x, weight = words(share), torch.randn(8, 300, generator=torch.Generator().manual_seed(2), requires_grad=True)
    pull = torch.randn(40, 8, generator=torch.Generator().manual_seed(3))
    (gradient,) = torch.autograd.grad((sparse_linear.product(x, weight) * pull).sum(), weight)
    assert torch.allclose(sparse_linear.product(x, weight), x @ weight.T, atol=1e-5)
    assert torch.allclose(gradient, pull.T @ x, atol=1e-5)


def test_only_what_is_not_zero_is_kept_and_dense_features_are_multiplied():
    few, many = words(0.02), words(0.5)
    rows, columns = sparse_linear.sparse_form(few)
    assert len(rows.values()) == len(columns.values()) == int(torch.count_nonzero(few))
    assert sparse_linear.sparse_form(many) is None


def test_the_sparse_form_is_computed_once_and_dropped_with_its_tensor(monkeypatch):
    x, weight, calls, made = words(0.02), torch.ones(2, 300), [], sparse_linear.new_sparse_form
    monkeypatch.setattr(sparse_linear, "new_sparse_form", lambda t: (calls.append(1), made(t))[1])
    for _ in range(3):
        sparse_linear.product(x, weight)
    assert len(calls) == 1
    kept = weakref.ref(sparse_linear.sparse_form(x)[0])
    assert kept() is not None
    del x
    gc.collect()
    assert kept() is None


def test_the_sparse_form_of_a_changed_tensor_is_computed_again():
    x, weight = words(0.02), torch.ones(2, 300)
    before = sparse_linear.product(x, weight)
    x[:, 0] += 1
    assert torch.allclose(sparse_linear.product(x, weight), before + 1, atol=1e-5)


def test_features_that_are_themselves_learnt_keep_their_gradient():
    x = words(0.02).requires_grad_()
    sparse_linear.product(x, torch.ones(2, 300)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
