"""ResNet-18 (He et al., 2016) for small images, as h in x -> u = h(x): the base encoder of the image streams.

The stem is one 3x3 convolution without max-pooling; above 32 pixels it has stride 2, so that a 64-pixel image costs
what a 32-pixel one does from there on. There are no pretrained weights: everything is learned in domain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from profcil.accel.resnet import Twins, fork, layer
from profcil.data.bundle import Bundle
from profcil.model.layers import Pixels, drawn, image_shape, layers

Norm = Callable[[int], nn.Module]


class Projection(nn.Sequential):
    """A shortcut where the shape changes: a 1x1 convolution, normalised. It goes with the layer beside it."""

    def beside(self, convolution: nn.Conv2d, norm: nn.Module, twins: Twins) -> tuple[Tensor, Tensor]:
        thin, other = self
        return fork(convolution, norm, thin, other, twins)  # type: ignore[arg-type]


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes. Of the twins that come
    in, one goes each way, unless kernels take the first layer and the shortcut together."""

    def __init__(self, before: int, after: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        same = stride == 1 and before == after
        project = nn.Conv2d(before, after, 1, stride, bias=False)
        self.shortcut = nn.Identity() if same else Projection(project, norm(after))

    def forward(self, twins: Twins) -> Twins:
        if isinstance(self.shortcut, Projection):
            y, aside = self.shortcut.beside(self.conv1, self.norm1, twins)
        else:
            (y, _), aside = layer(self.conv1, self.norm1, twins[0]), twins[1]
        return layer(self.conv2, self.norm2, y, aside)


class ResNet18(nn.Module):
    def __init__(self, pixels: Pixels, shape: tuple[int, int, int], width: int, norm: Norm) -> None:
        super().__init__()
        channels, height, _ = shape
        self.pixels = pixels
        self.stem = nn.Conv2d(channels, width, 3, 2 if height > 32 else 1, 1, bias=False)
        self.norm = norm(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        pairs = zip(widths, widths[1:], (1, 2, 2, 2), strict=False)
        blocks = [(Block(a, b, stride, norm), Block(b, b, 1, norm)) for a, b, stride in pairs]
        self.blocks = nn.Sequential(*[block for pair in blocks for block in pair])
        self.features = 8 * width

    def forward(self, x: Tensor) -> Tensor:
        twins = layer(self.stem, self.norm, self.pixels(x))
        return self.blocks(twins)[0].mean((2, 3))


def build(bundle: Bundle, *, generator: torch.Generator, norm: str = "batch", width: int = 0) -> ResNet18:
    """`width` is the number of channels after the stem; 0 means 64, which gives 512 features."""
    shape = image_shape(bundle, "resnet18")
    make = layers(norm, "batch", "group")
    return drawn(lambda: ResNet18(Pixels(bundle, shape[0]), shape, width or 64, make), generator)
