"""The kernels of image views against the formulas, without a GPU: see `run_interpreted`."""

from __future__ import annotations

PROGRAM = """
import itertools, torch
from profcil.accel.triton import augmentations as kernels
from profcil.model import augmentations

torch.manual_seed(0)
ULP, NEAR = 2**-24, 1e-5  # on a CPU, bytes are divided by 255; the kernels do as the library does on a GPU
for (c, h, w), crop, flip in itertools.product([(3, 32, 32), (1, 28, 28), (2, 8, 12)], [False, True], [False, True]):
    n = 6
    bright = torch.linspace(0.3, 1, c)[:, None, None] * torch.linspace(0.5, 1, w)  # means of images and channels differ
    x = torch.rand(n, c, h, w) * bright
    bytes = (x * 255).to(torch.uint8, memory_format=torch.channels_last)
    draws, zoom, colour = (torch.rand(count, n, 1) for count in (3, 5, 4))
    draws[0] = zoom[4] = colour[3] = torch.linspace(0, 0.9, n)[:, None]  # some flipped, some gray, some neither
    for t, off in ((x, 0), (bytes, ULP)):
        found, right = kernels.shift(t, draws, crop, flip), augmentations.shift(t, draws, crop, flip)
        assert found.is_contiguous() and found.dtype == torch.float32
        assert (found - right).abs().max() <= off, (c, crop, flip, t.dtype)
        for jitter in (None, colour):
            found, right = (how.distort(t, zoom, jitter, crop, flip) for how in (kernels, augmentations))
            assert found.is_contiguous() and found.dtype == torch.float32
            assert (found - right).abs().max() <= NEAR, (c, crop, flip, jitter is None, t.dtype)
"""


def test_kernels_make_the_views_that_the_formulas_make(run_interpreted):
    run_interpreted(PROGRAM)
