"""Normalise, add, rectify as one function: its formulas against autograd, for one group and several."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from profcil.encoders import fused
from profcil.encoders.norms import BatchNorm


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


def separately(x, weight, bias, added, mean, var, groups, rectify):
    """What the groups would give one after another, by torch's own functions."""
    y = torch.cat([F.batch_norm(part, mean, var, weight, bias, True, 0.1, 1e-5) for part in x.chunk(groups)])
    y = y if added is None else y + added
    return y.relu() if rectify else y


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("rectify", [False, True])
def test_output_gradients_and_running_statistics_are_those_of_separate_batches(groups, adds, rectify):
    start = [3 + 2 * drawn(6, 4, 5, 5), 1 + drawn(4), drawn(1, 4)[0], drawn(6, 4, 5, 5).flip(0)]
    results = []
    for fast in (True, False):
        x, w, b, added = (t.clone().requires_grad_() for t in start)
        mean, var = torch.zeros(4), torch.ones(4)
        extra = added if adds else None
        if fast:
            y = fused.Normalise.apply(x, w, b, extra, mean, var, 0.1, 1e-5, groups, rectify)
        else:
            y = separately(x, w, b, extra, mean, var, groups, rectify)
        wanted = [x, w, b, added] if adds else [x, w, b]
        results.append([y, mean, var, *torch.autograd.grad((y * drawn(6, 4, 5, 5)).sum(), wanted)])
    for fast, plain in zip(*results, strict=True):
        assert torch.allclose(fast, plain, atol=2e-5)


def test_without_kernels_the_layers_run_one_by_one():
    norm, x = BatchNorm(4).train(), drawn(2, 4, 3, 3)
    other = BatchNorm(4).train()
    assert torch.equal(fused.normalised(norm, x, x), (other(x) + x).relu())
    assert torch.equal(fused.normalised(norm.eval(), x, rectify=False), other.eval()(x))
    assert not fused.joins(norm, [(x,), (x,)])


def test_groups_are_set_for_a_while_only():
    norm = BatchNorm(4)
    with pytest.raises(RuntimeError), fused.groups(norm, 3):
        assert norm.groups == 3
        raise RuntimeError
    assert norm.groups == 1
