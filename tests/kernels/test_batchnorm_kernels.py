"""The kernels of a normalised layer against the formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.accel import resnet
from profcil.accel.triton import batchnorm

CHANNELS = 80
either = [False, True]


def images(*shape: int) -> Tensor:
    return (torch.randn(shape) * 2 + 1).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(6, 16, 3, 3), (3, 80, 5, 7)], ids=str)
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("adds", either)
@pytest.mark.parametrize("rectify", either)
@pytest.mark.parametrize("readers", [1, 2])
def test_a_layer_s_kernels_compute_what_the_formulas_say(shape, groups, adds, rectify, readers):
    channels = shape[1]
    x, other, *grads = (images(*shape) for _ in range(2 + readers))
    added = other if adds else None
    w, b = torch.rand(channels) + 0.5, torch.rand(channels)
    results = []
    for how in (batchnorm, resnet):
        mean, var = torch.zeros(channels), torch.ones(channels)
        y, centre, scale = how.forward(x, w, b, added, mean, var, 0.1, 1e-5, groups, rectify)
        back = how.backward(grads, x, y if adds else None, w, b, centre, scale, groups, rectify, adds)
        results.append([y, centre, scale, mean, var, *(t for t in back if t is not None)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    right = F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5) + (other if adds else 0)
    found = batchnorm.eval_forward(x, w, b, added, mean, var, 1e-5, rectify)
    torch.testing.assert_close(found, right.relu() if rectify else right, rtol=1e-4, atol=1e-4)


def test_moments_and_their_gradients_are_those_of_torch(monkeypatch):
    x = images(6, CHANNELS, 5, 7).requires_grad_()
    known = torch.rand(CHANNELS)
    results = []
    for by_kernels in (True, False):
        monkeypatch.setattr(resnet, "fits", lambda x, by_kernels=by_kernels: by_kernels)
        mean, var = resnet.moments(x)
        loss = (mean * known).sum() + (var - known).square().sum()
        results.append([mean, var, *torch.autograd.grad(loss, x)])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("adds", either)
@pytest.mark.parametrize("rectify", either)
@pytest.mark.parametrize("observed", either)
@pytest.mark.parametrize("both", either, ids=["one reader", "two readers"])
@pytest.mark.parametrize("summed", either)
def test_a_layer_in_evaluation_mode_has_the_output_and_gradients_of_torch(
    monkeypatch, adds, rectify, observed, both, summed
):
    monkeypatch.setattr(resnet, "norm_kernels", lambda: batchnorm)
    x, added = (images(6, CHANNELS, 5, 7).requires_grad_() for _ in range(2))
    g, h = (images(6, CHANNELS, 5, 7) for _ in range(2))
    w, b, mean, var = (
        torch.rand(CHANNELS) + 0.5,
        torch.rand(CHANNELS),
        torch.randn(CHANNELS),
        torch.rand(CHANNELS) + 0.5,
    )
    parts = x.detach().permute(0, 2, 3, 1).reshape(6, -1, CHANNELS)  # equal pieces of all pixels, in order
    sums = torch.stack([parts.sum(1), parts.var(1, correction=0) * parts.shape[1]], 1).contiguous() if summed else None
    results = []
    for ours in (True, False):
        if ours:
            spread = (w, b, mean, var, 1e-5, rectify, observed)
            one, two, *seen = resnet.EvalNormalise.apply(x, added if adds else None, sums, *spread)
        else:
            one = F.batch_norm(x, mean, var, w, b, False, 0.0, 1e-5) + (added if adds else 0)
            one = two = one.relu() if rectify else one
            seen = torch.var_mean(x, (0, 2, 3), correction=0)[::-1]
        loss = (one * g).sum() + ((two * h).sum() if both else 0)
        loss = loss + (((seen[0] * w).sum() + (seen[1] - b).square().sum()) * 1e3 if observed else 0)
        found = torch.autograd.grad(loss, [x, added] if adds else [x])
        results.append([one.detach(), *found, *(t.detach() for t in (seen if observed else ()))])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


def test_a_gradient_of_the_moments_alone_reaches_the_input(monkeypatch):
    monkeypatch.setattr(resnet, "norm_kernels", lambda: batchnorm)
    x = images(6, CHANNELS, 5, 7).requires_grad_()
    w, b, mean, var = (
        torch.rand(CHANNELS) + 0.5,
        torch.rand(CHANNELS),
        torch.randn(CHANNELS),
        torch.rand(CHANNELS) + 0.5,
    )
    *_, seen, _ = resnet.EvalNormalise.apply(x, None, None, w, b, mean, var, 1e-5, True, True)
    (only,) = torch.autograd.grad((seen * w).sum(), x)
    torch.testing.assert_close(only, (w / 210)[:, None, None].expand_as(x), rtol=1e-4, atol=1e-6)
