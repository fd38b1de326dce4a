"""The convolution that images enter by, without a GPU: see `run_interpreted`."""

from __future__ import annotations

PROGRAM = """
import torch, torch.nn.functional as F
from profcil.accel.triton import batchnorm
from profcil.accel.triton import conv_stem
from profcil.accel import resnet

asked = []
conv_stem.agrees = lambda *kind: asked.append(kind) or True  # it asks a GPU
torch.manual_seed(0)
near = lambda a, b: bool((a - b).abs().max() <= 1e-4 * b.abs().max())
last, most = torch.channels_last, conv_stem.PARTS
kinds = ((2, 3, 64, (32, 32), 1), (8, 3, 64, (8, 8), 2), (4, 1, 128, (16, 16), 1), (8, 2, 64, (6, 8), 1))
for n, c, k, size, groups in kinds:
    images, filters = torch.randn(n, c, *size), torch.randn(k, c, 3, 3)
    beside = torch.randn(n, c + 1, size[0], 2 * size[1])[:, 1:, :, ::2].copy_(images)  # with gaps
    forms = ((images, filters), (images.to(memory_format=last), filters.to(memory_format=last)), (beside, filters))
    right = F.conv2d(images, filters, None, 1, 1)
    d = torch.randn_like(right).to(memory_format=last)
    shape = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    dw = torch.ops.aten.convolution_backward(d, images, filters, None, *shape)[1]
    for x, w in forms:
        assert conv_stem.takes(x, w, 1, (1, 1), groups)
        y, sums = conv_stem.ahead(x, w)
        assert near(y, right) and y.is_contiguous(memory_format=last), (n, c, k, size)
        tiles = right.permute(0, 2, 3, 1).reshape(len(sums), conv_stem.PIXELS, k)
        assert near(sums[:, 0], tiles.sum(1)) and near(sums[:, 1], tiles.var(1, correction=0) * conv_stem.PIXELS)
        for conv_stem.PARTS in (1, 2, most):  # of one tile, of several, and a last one of fewer
            slopes = conv_stem.slopes(d, x, w)
            assert near(slopes, dw) and slopes.stride() == w.stride(), (n, c, k, size, conv_stem.PARTS)
    one, told = torch.ones(k), []
    for how, known in ((batchnorm, sums), (batchnorm, None), (resnet, None)):
        mean, var = torch.zeros(k), torch.ones(k)
        told.append([*how.forward(y, one, one, None, mean, var, 0.1, 1e-5, groups, True, known), mean, var])
    assert all(near(a, b) and near(a, c) for a, b, c in zip(*told)), (n, c, k, size)

x, w = torch.zeros(2, 3, 8, 8), torch.zeros(64, 3, 3, 3)
asked.clear()
assert conv_stem.takes(x, w, 1, (1, 1), 1) and asked == [(3, 64, 8, 8, torch.float32, x.device)]
for why, refused in {
    "step": (x, w, 2, (1, 1), 1), "padding": (x, w, 1, (0, 0), 1), "same": (x, w, 1, "same", 1),
    "groups": (x, w, 1, (1, 1), 2), "images": (x[:1], w, 1, (1, 1), 1), "none": (x[:0], w, 1, (1, 1), 1),
    "one image": (x[0], w, 1, (1, 1), 1), "bytes": (x.byte(), w, 1, (1, 1), 1),
    "inputs": (x[:, :2], w, 1, (1, 1), 1), "filters": (x, w[:32], 1, (1, 1), 1),
    "taps": (x, w[..., :1, :1], 1, (1, 1), 1),
    "many inputs": (torch.zeros(2, 4, 8, 8), torch.zeros(64, 4, 3, 3), 1, (1, 1), 1),
}.items():
    assert not conv_stem.takes(*refused), why
assert len(asked) == 1
"""


def test_the_first_convolution_and_the_sums_it_hands_on_are_the_library_s(run_interpreted):
    run_interpreted(PROGRAM)
