"""The kernels of the first convolution of the images, against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from profcil.accel import resnet
from profcil.accel.triton import batchnorm, conv_stem

CHANNELS_LAST = torch.channels_last
KINDS = [(2, 3, 64, (32, 32), 1), (8, 3, 64, (8, 8), 2), (4, 1, 128, (16, 16), 1), (8, 2, 64, (6, 8), 1)]


@pytest.fixture(autouse=True)
def asked(monkeypatch) -> list[tuple]:
    """The kinds of kernels that a self-check would compare on a GPU."""
    kinds: list[tuple] = []
    monkeypatch.setattr(conv_stem, "agrees", lambda *kind: kinds.append(kind) or True)
    return kinds


def near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-4 * b.abs().max())


@pytest.mark.parametrize(("n", "c", "k", "size", "groups"), KINDS)
@pytest.mark.parametrize("form", ["planes", "channels last", "with gaps"])
def test_output_sums_and_gradients_are_the_library_s(n, c, k, size, groups, form, monkeypatch):
    images, filters = torch.randn(n, c, *size), torch.randn(k, c, 3, 3)
    beside = torch.randn(n, c + 1, size[0], 2 * size[1])[:, 1:, :, ::2].copy_(images)
    x = {"planes": images, "channels last": images.to(memory_format=CHANNELS_LAST), "with gaps": beside}[form]
    w = filters.to(memory_format=CHANNELS_LAST) if form == "channels last" else filters
    right = F.conv2d(images, filters, None, 1, 1)
    d = torch.randn_like(right).to(memory_format=CHANNELS_LAST)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    dw = torch.ops.aten.convolution_backward(d, images, filters, None, *shape)[1]
    assert conv_stem.supports(x, w, 1, (1, 1), groups)
    y, sums = conv_stem.forward(x, w)
    assert near(y, right) and y.is_contiguous(memory_format=CHANNELS_LAST)
    tiles = right.permute(0, 2, 3, 1).reshape(len(sums), conv_stem.PIXELS, k)
    assert near(sums[:, 0], tiles.sum(1)) and near(sums[:, 1], tiles.var(1, correction=0) * conv_stem.PIXELS)
    for parts in (1, 2, conv_stem.PARTS):  # of one tile, of several, and a last one of fewer
        monkeypatch.setattr(conv_stem, "PARTS", parts)
        gradient = conv_stem.filter_gradient(d, x, w)
        assert near(gradient, dw) and gradient.stride() == w.stride()


@pytest.mark.parametrize(("n", "c", "k", "size", "groups"), KINDS)
def test_its_sums_normalise_as_its_output_does(n, c, k, size, groups):
    y, sums = conv_stem.forward(torch.randn(n, c, *size), torch.randn(k, c, 3, 3))
    one = torch.ones(k)
    results = []
    for how, known in ((batchnorm, sums), (batchnorm, None), (resnet, None)):
        mean, var = torch.zeros(k), torch.ones(k)
        results.append([*how.forward(y, one, one, None, mean, var, 0.1, 1e-5, groups, True, known), mean, var])
    for by_sums, by_kernels, plain in zip(*results, strict=True):
        assert near(by_sums, by_kernels) and near(by_sums, plain)


X, W = torch.zeros(2, 3, 8, 8), torch.zeros(64, 3, 3, 3)


def test_supported_images_pass_the_self_check_first(asked):
    assert conv_stem.supports(X, W, 1, (1, 1), 1)
    assert asked == [(3, 64, 8, 8, torch.float32, X.device)]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param((X, W, 2, (1, 1), 1), id="step"),
        pytest.param((X, W, 1, (0, 0), 1), id="padding"),
        pytest.param((X, W, 1, "same", 1), id="same"),
        pytest.param((X, W, 1, (1, 1), 2), id="groups"),
        pytest.param((X[:1], W, 1, (1, 1), 1), id="images"),
        pytest.param((X[:0], W, 1, (1, 1), 1), id="none"),
        pytest.param((X[0], W, 1, (1, 1), 1), id="one image"),
        pytest.param((X.byte(), W, 1, (1, 1), 1), id="bytes"),
        pytest.param((X[:, :2], W, 1, (1, 1), 1), id="inputs"),
        pytest.param((X, W[:32], 1, (1, 1), 1), id="filters"),
        pytest.param((X, W[..., :1, :1], 1, (1, 1), 1), id="taps"),
        pytest.param((torch.zeros(2, 4, 8, 8), torch.zeros(64, 4, 3, 3), 1, (1, 1), 1), id="many inputs"),
    ],
)
def test_unsupported_images_are_refused(given, asked):
    assert not conv_stem.supports(*given)
    assert not asked
