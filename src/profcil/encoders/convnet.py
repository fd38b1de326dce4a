"""A small convolutional network for tiny images (8x8 digits): the base encoder of the embedded default dataset.

Each convolution is followed by pooling, and the last layer is linear.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.model.layers import Pixels, drawn, image_shape, layers


class ConvNet(nn.Module):
    def __init__(self, pixels: Pixels, shape: tuple[int, int, int], width: int, norm: str) -> None:
        super().__init__()
        make = layers(norm, "batch", "group", "none")
        channels, rows, columns = shape
        bias = norm == "none"
        self.pixels = pixels
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=bias)
        self.norm1 = make(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=bias)
        self.norm2 = make(2 * width)
        self.features = 4 * width
        places = (rows // 4) * (columns // 4)
        self.out = nn.Linear(2 * width * places, self.features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.pixels(x))
        x = F.max_pool2d(F.relu(self.norm1(x)), 2)
        x = self.conv2(x)
        x = F.max_pool2d(F.relu(self.norm2(x)), 2)
        return F.relu(self.out(x.flatten(1)))


def build(bundle: Bundle, *, generator: torch.Generator, norm: str = "batch", width: int = 0) -> ConvNet:
    """Builds the encoder. `width` is the number of channels of the first convolution; 0 means 32, for 128 features."""
    shape = image_shape(bundle, "convnet")
    pixels = Pixels(bundle, shape[0])
    return drawn(lambda: ConvNet(pixels, shape, width or 32, norm), generator)
