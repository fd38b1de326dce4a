"""The kernels of image views against the formulas."""

from __future__ import annotations

import pytest
import torch

from profcil.accel.triton import augmentations as kernels
from profcil.model import augmentations

ULP = 2**-24  # on a CPU, bytes are divided by 255; the kernels do as torch does on a GPU
NEAR = 1e-5
IMAGES = 6


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 28, 28), (2, 8, 12)])
@pytest.mark.parametrize("crop", [False, True])
@pytest.mark.parametrize("flip", [False, True])
def test_kernels_make_the_views_that_the_formulas_make(channels, height, width, crop, flip):
    bright = torch.linspace(0.3, 1, channels)[:, None, None] * torch.linspace(0.5, 1, width)  # means differ
    x = torch.rand(IMAGES, channels, height, width) * bright
    as_bytes = (x * 255).to(torch.uint8, memory_format=torch.channels_last)
    draws, zoom, colour = (torch.rand(count, IMAGES, 1) for count in (3, 5, 4))
    draws[0] = zoom[4] = colour[3] = torch.linspace(0, 0.9, IMAGES)[:, None]  # some flipped, some gray, some neither
    for t, tolerance in ((x, 0), (as_bytes, ULP)):
        found, right = (how.shift(t, draws, crop, flip) for how in (kernels, augmentations))
        assert found.is_contiguous() and found.dtype == torch.float32
        assert (found - right).abs().max() <= tolerance
        for jitter in (None, colour):
            found, right = (how.distort(t, zoom, jitter, crop, flip) for how in (kernels, augmentations))
            assert found.is_contiguous() and found.dtype == torch.float32
            assert (found - right).abs().max() <= NEAR
