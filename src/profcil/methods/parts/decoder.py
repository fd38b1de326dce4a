"""A latent layer and a decoder that make an image encoder a variational autoencoder.

The decoder is that of Hybrid Replay for 32 x 32 images (1.41 million parameters there): a linear layer to 64 channels
of at most 8 x 8, then upsampling and convolutions up to the image's size, and a sigmoid. It uses the encoder's kind of
normalisation, batch or group, so that one setting holds for the whole model.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.memory.rehearsal import Balanced
from profcil.model.layers import NORMS, BatchNorm, drawn
from profcil.model.net import Net, Weights

CHANNELS = 64  # of the first and the last feature maps; twice as many between
SMALL_SIDE = 8  # the longest side of the first feature maps
LEAST_LATENT = 16  # a tenth of an 8 x 8 image would be too few to decode it, and to place ten classes
CHUNK = 512  # images per forward pass outside of training


def latent_size(shape: tuple[int, int, int]) -> int:
    """The default length of a code: a tenth of an image's numbers, e.g. 307 for 3 x 32 x 32."""
    channels, height, width = shape
    return max(LEAST_LATENT, channels * height * width // 10)


class Latent(nn.Module):
    """u → (μ, log σ²)."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.mu = nn.Linear(features, size)
        self.logvar = nn.Linear(features, size)

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.mu(u), self.logvar(u)


class ImageDecoder(nn.Module):
    """A latent code → an image."""

    def __init__(self, size: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        make_norm = NORMS[norm]
        channels, height, width = shape
        self.small, *self.sides = map_sizes(height, width)
        self.channels = c = min(CHANNELS, 4 * max(height, width))  # fewer for tiny images
        small_height, small_width = self.small
        self.widen = nn.Linear(size, c * small_height * small_width)
        self.norm = make_norm(c)
        between = len(self.sides) - 1
        widths = [c, *[2 * c] * between, c]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(make_norm(b) for b in widths[1:])
        self.out = nn.Conv2d(c, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.widen(z).view(len(z), self.channels, *self.small)
        x = self.norm(x)
        for side, conv, norm in zip(self.sides, self.convs, self.norms, strict=True):
            x = conv(F.interpolate(x, side))
            x = F.leaky_relu(norm(x), 0.2)
        images: Tensor = self.out(x).sigmoid()
        return images


def map_sizes(height: int, width: int) -> list[tuple[int, int]]:
    """The sizes of the feature maps in ascending order: the image's size, halved at least twice, until both sides are
    small."""
    sizes = [(height, width)]
    while len(sizes) < 3 or max(sizes[0]) > SMALL_SIDE:
        rows, columns = sizes[0]
        halved = (ceil(rows / 2), ceil(columns / 2))
        sizes.insert(0, halved)
    return sizes


def make_latent(features: int, size: int, generator: torch.Generator) -> Latent:
    """A latent layer. Its weights of log σ² are zero, so that σ starts at 1: random ones could make it very large."""
    latent = drawn(lambda: Latent(features, size), generator)
    nn.init.zeros_(latent.logvar.weight)
    return latent


def make_decoder(
    size: int, shape: tuple[int, int, int], encoder: nn.Module, generator: torch.Generator
) -> ImageDecoder:
    """A decoder with the encoder's kind of normalisation."""
    has_batchnorm = any(isinstance(m, BatchNorm) for m in encoder.modules())
    norm = "batch" if has_batchnorm else "group"
    return drawn(lambda: ImageDecoder(size, shape, norm), generator)


def latent_of(net: nn.Module) -> Latent:
    return net.get_submodule("latent")  # type: ignore[return-value]


def decoder_of(net: nn.Module) -> ImageDecoder:
    return net.get_submodule("decoder")  # type: ignore[return-value]


def autoencode(net: nn.Module, x: Tensor, noise: Tensor, prefix: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """μ, log σ², z = μ + σ·noise and the image decoded from z, in float32. The blocks' names begin with `prefix`."""
    base = net.get_submodule(f"{prefix}base")
    latent = net.get_submodule(f"{prefix}latent")
    decoder = net.get_submodule(f"{prefix}decoder")
    mu, logvar = (t.float() for t in latent(base(x)))
    sigma = (logvar / 2).exp()
    z = mu + sigma * noise
    return mu, logvar, z, decoder(z).float()


@torch.no_grad()
def encode(net: Net, weights: Weights, x: Tensor) -> Tensor:
    """μ of some images, in evaluation mode and in chunks that bound the memory."""
    net.load(weights)
    net.eval()
    latent = latent_of(net)
    codes = []
    for chunk in x.split(CHUNK):
        features = net.base(chunk)
        codes.append(latent.mu(features))
    return torch.cat(codes)


@torch.no_grad()
def decode(net: Net, weights: Weights, z: Tensor) -> Tensor:
    """The images of some codes, in evaluation mode and in chunks that bound the memory."""
    net.load(weights)
    net.eval()
    decoder = decoder_of(net)
    return torch.cat([decoder(chunk) for chunk in z.split(CHUNK)])


class DecodedSource:
    """Batches of real and decoded images. An epoch has every real image once and `quota` decoded ones of each old
    class; a class with fewer is repeated. The decoded images are the last rows of `x`; `decoded` are their labels, on
    the CPU."""

    def __init__(self, x: Tensor, y: Tensor, quota: int, decoded: Tensor) -> None:
        self.x = x
        self.y = y
        self.real = len(y) - len(decoded)
        self.balanced = Balanced(decoded, quota, y.device)
        self.replayed = len(self.balanced.labels)
        self.size = self.real + self.replayed

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        real = torch.arange(self.real, device=self.y.device)
        decoded = self.real + self.balanced.draw(rng)
        index = torch.cat([real, decoded])
        return {"x": self.x[index], "y": self.y[index]}
