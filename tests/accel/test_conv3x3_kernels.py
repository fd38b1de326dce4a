"""Convolutions by kernels, without a GPU: see `run_interpreted`."""

from __future__ import annotations

PROGRAM = """
import torch, torch.nn.functional as F
from profcil.accel.triton import conv3x3
from profcil.accel.triton import batchnorm
from profcil.accel import resnet

conv3x3.agrees = lambda *kind: True  # it asks a GPU
torch.manual_seed(0)
near = lambda a, b: bool((a - b).abs().max() <= 1e-4 * b.abs().max())
parts = ((1, 64, 64, 32, 1), (3, 64, 64, 16, 1), (8, 64, 128, 16, 2))  # of the filters' gradients are 8, 2 and 4
for n, c, k, size, step in (*parts, (8, 128, 64, 8, 2), (8, 128, 128, 4, 1)):
    x, w = (torch.randn(s).to(memory_format=torch.channels_last) for s in ((n, c, size, size), (k, c, 3, 3)))
    assert conv3x3.takes(x, w, step, 1)
    y, sums = conv3x3.ahead(x, w, step)
    right = F.conv2d(x, w, None, step, 1)
    d = torch.randn_like(right).to(memory_format=torch.channels_last)
    shape = ([step] * 2, [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    dx, dw, _ = torch.ops.aten.convolution_backward(d, x, w, None, *shape)
    slopes = conv3x3.slopes(d, x, step)
    assert near(y, right) and near(conv3x3.back(d, w, step), dx) and near(slopes, dw), (n, c, k, size, step)
    assert slopes.is_contiguous(memory_format=torch.channels_last)
    one, told = torch.ones(k), []
    for how, known in ((batchnorm, sums), (batchnorm, None), (resnet, None)):
        mean, var = torch.zeros(k), torch.ones(k)
        told.append([*how.forward(y, one, one, None, mean, var, 0.1, 1e-5, 1, True, known), mean, var])
    assert all(near(a, b) and near(a, c) for a, b, c in zip(*told)), (n, c, k, size, step)
for n, c, k, size in ((8, 64, 128, 16), (8, 128, 64, 8), (3, 64, 64, 32)):  # of the 1x1 filters' gradients are 4, 1, 2
    shapes = (n, c, size, size), (k, c, 3, 3), (k, c, 1, 1), (n, k, size // 2, size // 2)
    x, w, thin, d = (torch.randn(s).to(memory_format=torch.channels_last) for s in shapes)
    assert conv3x3.takes(x, thin, 2, 1) and not conv3x3.takes(x, thin, 1, 1)
    y, sums = conv3x3.ahead(x, thin, 2)
    right = F.conv2d(x, thin, None, 2)
    tiles = right.permute(0, 2, 3, 1).reshape(len(sums), -1, k)
    assert near(y, right) and near(sums[:, 0], tiles.sum(1)), (n, c, k, size)
    assert near(sums[:, 1], tiles.var(1, correction=0) * tiles.shape[1]), (n, c, k, size)
    beside, found = torch.randn_like(right).contiguous(memory_format=torch.channels_last), []
    for slope, weight, pad in ((d, w, 1), (beside, thin, 0)):
        shape = ([2, 2], [pad] * 2, [1, 1], False, [0, 0], 1, [True, True, False])
        found.append(torch.ops.aten.convolution_backward(slope, x, weight, None, *shape))
    (dx, dw, _), (more, narrow, _) = found
    slopes = conv3x3.slopes(beside, x, 2, 1)
    assert slopes.shape == thin.shape and slopes.is_contiguous() and near(slopes, narrow), (n, c, k, size)
    assert near(conv3x3.back(d, w, 2, (beside, thin)), dx + more) and near(conv3x3.back(d, w, 2), dx), (n, c, k, size)
assert not conv3x3.takes(torch.zeros(3, 128, 4, 4).to(memory_format=torch.channels_last), w, 1, 1)
x, w = (torch.zeros(s).to(memory_format=torch.channels_last) for s in ((8, 640, 4, 4), (640, 640, 3, 3)))
assert not conv3x3.takes(x, w, 1, 1)
"""


def test_convolutions_and_the_sums_they_hand_on_are_the_library_s(run_interpreted):
    run_interpreted(PROGRAM)
