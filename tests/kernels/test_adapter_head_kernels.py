"""The kernels of a stack of adapters and heads against autograd."""

from __future__ import annotations

import pytest
import torch

from profcil.accel.triton import adapter_head
from profcil.model.losses import cross_entropy
from profcil.model.net import Tail


def shapes_of(d: int, narrow: int, classes: int) -> dict[str, torch.Size]:
    vectors = {"scale": (d,), "shift": (d,), "down_bias": (narrow,), "up_bias": (d,)}
    shapes = vectors | {"down": (narrow, d), "up": (d, narrow), "weight": (classes, d)}
    return {k: torch.Size(s) for k, s in shapes.items()}


@pytest.mark.parametrize(
    ("width", "batch", "d", "narrow", "classes"), [(3, 20, 70, 17, 11), (2, 64, 128, 32, 20), (9, 40, 30, 17, 5)]
)
def test_the_gradient_by_kernels_is_that_of_the_loss(width, batch, d, narrow, classes):
    shapes = shapes_of(d, narrow, classes)
    sizes = [s.numel() for s in shapes.values()]
    flat = torch.randn(width, sum(sizes) + 7)[:, : sum(sizes)] * 0.2
    u = torch.randn(3, width, batch, d) * 2 + 1
    y = torch.randint(0, classes // 2, (3, width, batch))
    allowed = (torch.rand(width, classes) < 0.5) | (torch.arange(classes) < classes // 2)
    number = torch.tensor([4])
    grad = torch.full((width, sum(sizes)), torch.nan)
    kernels = adapter_head.HeadGradient(flat, shapes, batch)
    kernels(flat, u, y, number, allowed, grad)
    pieces = zip(shapes.items(), flat.split(sizes, 1), strict=True)
    own = {k: piece.reshape(width, *shape).requires_grad_() for (k, shape), piece in pieces}
    loss = cross_entropy(Tail(own, own).classify(u[1]), y[1], allowed)  # of three batches, number 4 is the second
    right = torch.cat([g.flatten(1) for g in torch.autograd.grad(loss.sum(), list(own.values()))], 1)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)
    total = torch.ones(width)
    active = torch.arange(width) < width - 1
    kernels.count(total, number, active)
    torch.testing.assert_close(total, 1 + loss.detach() * active)
    assert number.item() == 5
