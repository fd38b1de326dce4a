"""ResNet-18 (He et al., 2016) for small images: the base encoder of the image streams.

The stem is one 3x3 convolution without max-pooling. For images larger than 32 pixels its stride is 2, so that the
blocks cost the same for 64 pixels as for 32. There are no pretrained weights.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.model.layers import Pixels, drawn, image_shape, layers

Norm = Callable[[int], nn.Module]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a normalised 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        project = nn.Conv2d(before, after, 1, stride, bias=False)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Sequential(project, norm(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    def __init__(self, pixels: Pixels, shape: tuple[int, int, int], width: int, norm: Norm) -> None:
        super().__init__()
        channels, height, _ = shape
        stride = 2 if height > 32 else 1
        self.pixels = pixels
        self.stem = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm = norm(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks: list[nn.Module] = []
        for (before, after), stride in zip(pairwise(widths), (1, 2, 2, 2), strict=True):
            first = ResidualBlock(before, after, stride, norm)
            second = ResidualBlock(after, after, 1, norm)
            blocks += [first, second]
        self.blocks = nn.Sequential(*blocks)
        self.features = 8 * width

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(self.pixels(x))
        x = F.relu(self.norm(x))
        maps: Tensor = self.blocks(x)
        return maps.mean((2, 3))


def build(bundle: Bundle, *, generator: torch.Generator, norm: str = "batch", width: int = 0) -> ResNet18:
    """Builds the encoder. `width` is the number of channels after the stem; 0 means 64, for 512 features."""
    shape = image_shape(bundle, "resnet18")
    make = layers(norm, "batch", "group")
    pixels = Pixels(bundle, shape[0])
    return drawn(lambda: ResNet18(pixels, shape, width or 64, make), generator)
