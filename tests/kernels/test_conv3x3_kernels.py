"""Convolutions by kernels against those of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.accel import resnet
from profcil.accel.triton import batchnorm, conv3x3

# The gradients of the filters are summed in several parts: of the first three shapes there are 8, 2 and 4.
SHAPES = [(1, 64, 64, 32, 1), (3, 64, 64, 16, 1), (8, 64, 128, 16, 2), (8, 128, 64, 8, 2), (8, 128, 128, 4, 1)]
FORKS = [(8, 64, 128, 16), (8, 128, 64, 8), (3, 64, 64, 32)]  # of the 1x1 filters' gradients there are 4, 1 and 2


@pytest.fixture(autouse=True)
def without_a_comparison_on_a_gpu(monkeypatch):
    monkeypatch.setattr(conv3x3, "agrees", lambda *kind: True)


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).to(memory_format=torch.channels_last)


def backward(d: Tensor, x: Tensor, weight: Tensor, step: int, pad: int) -> tuple[Tensor, Tensor]:
    """Torch's gradients of inputs and filters."""
    shape = ([step] * 2, [pad] * 2, [1, 1], False, [0, 0], 1, [True, True, False])
    dx, dw, _ = torch.ops.aten.convolution_backward(d, x, weight, None, *shape)
    return dx, dw


@pytest.mark.parametrize(("n", "c", "k", "size", "step"), SHAPES)
def test_convolutions_and_their_gradients_are_those_of_torch(n, c, k, size, step):
    x, w = drawn(n, c, size, size), drawn(k, c, 3, 3)
    assert conv3x3.supports(x, w, step, 1)
    y, _ = conv3x3.forward(x, w, step)
    right = F.conv2d(x, w, None, step, 1)
    d = drawn(*right.shape)
    dx, dw = backward(d, x, w, step, 1)
    gradient = conv3x3.filter_gradient(d, x, step)
    assert near(y, right) and near(conv3x3.input_gradient(d, w, step), dx) and near(gradient, dw)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("n", "c", "k", "size", "step"), SHAPES)
def test_the_sums_of_a_convolution_normalise_as_its_output_does(n, c, k, size, step):
    y, sums = conv3x3.forward(drawn(n, c, size, size), drawn(k, c, 3, 3), step)
    one = torch.ones(k)
    results = []
    for how, known in ((batchnorm, sums), (batchnorm, None), (resnet, None)):
        mean, var = torch.zeros(k), torch.ones(k)
        results.append([*how.forward(y, one, one, None, mean, var, 0.1, 1e-5, 1, True, known), mean, var])
    for by_sums, by_kernels, plain in zip(*results, strict=True):
        assert near(by_sums, by_kernels) and near(by_sums, plain)


@pytest.mark.parametrize(("n", "c", "k", "size"), FORKS)
def test_a_1x1_convolution_beside_a_3x3_one_is_that_of_torch(n, c, k, size):
    x, w, thin, d = drawn(n, c, size, size), drawn(k, c, 3, 3), drawn(k, c, 1, 1), drawn(n, k, size // 2, size // 2)
    assert conv3x3.supports(x, thin, 2, 1) and not conv3x3.supports(x, thin, 1, 1)
    y, sums = conv3x3.forward(x, thin, 2)
    right = F.conv2d(x, thin, None, 2)
    tiles = right.permute(0, 2, 3, 1).reshape(len(sums), -1, k)
    assert near(y, right) and near(sums[:, 0], tiles.sum(1))
    assert near(sums[:, 1], tiles.var(1, correction=0) * tiles.shape[1])
    beside = drawn(*right.shape)
    dx, _ = backward(d, x, w, 2, 1)
    more, narrow = backward(beside, x, thin, 2, 0)
    gradient = conv3x3.filter_gradient(beside, x, 2, 1)
    assert gradient.shape == thin.shape and gradient.is_contiguous() and near(gradient, narrow)
    assert near(conv3x3.input_gradient(d, w, 2, (beside, thin)), dx + more) and near(
        conv3x3.input_gradient(d, w, 2), dx
    )


@pytest.mark.parametrize(
    ("images", "filters"),
    [((3, 128, 4, 4), (64, 64, 3, 3)), ((3, 64, 4, 4), (64, 64, 3, 3)), ((8, 640, 4, 4), (640, 640, 3, 3))],
    ids=["other channels", "no whole tiles", "too many channels"],
)
def test_unsupported_sizes_are_refused(images, filters):
    x, w = (torch.zeros(s).to(memory_format=torch.channels_last) for s in (images, filters))
    assert not conv3x3.supports(x, w, 1, 1)
