"""An image encoder made a variational autoencoder: latent codes of base features, and a decoder back to pixels.

The decoder is that of Hybrid Replay for 32 x 32 images (1.41 million parameters there): a linear layer to 64 channels
of at most 8 x 8, then doubling and convolving until the image's size is reached, numbers in [0, 1] at the end. It
normalises as the encoder does, by batch or by group, so that one setting holds for the whole model.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.memory.rehearsal import Balanced
from profcil.model.layers import NORMS, BatchNorm, drawn
from profcil.model.net import Net, Tensors, Weights

CHANNELS, SMALL = 64, 8  # of the first and last maps, twice as many between; the side of the first maps
FEWEST = 16  # latent numbers: a tenth of an 8 x 8 image would not hold it, nor ten classes apart from each other
PIECE = 512  # images computed at once outside of training


def latent_size(shape: tuple[int, int, int]) -> int:
    """A tenth of an image's numbers, 307 of 3 x 32 x 32, and never too few to place classes in."""
    channels, height, width = shape
    return max(FEWEST, channels * height * width // 10)


class Latent(nn.Module):
    """u → (μ, log σ²). At first σ is 1 everywhere: drawn at random, exp(log σ²) can be anything."""

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.mu, self.logvar = nn.Linear(features, size), nn.Linear(features, size)

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.mu(u), self.logvar(u)


class Decoder(nn.Module):
    """A latent code → an image."""

    def __init__(self, size: int, shape: tuple[int, int, int], norm: str) -> None:
        super().__init__()
        self.sides, make = ladder(*shape[1:]), NORMS[norm]
        self.small = self.sides.pop(0)
        self.channels = c = min(CHANNELS, 4 * max(shape[1:]))  # fewer for tiny images
        self.widen = nn.Linear(size, c * self.small[0] * self.small[1])
        self.norm = make(c)
        widths = [c, *[2 * c] * (len(self.sides) - 1), c]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(make(b) for b in widths[1:])
        self.out = nn.Conv2d(c, shape[0], 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.norm(self.widen(z).view(len(z), self.channels, *self.small))
        for side, conv, norm in zip(self.sides, self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(F.interpolate(x, side))), 0.2)
        return self.out(x).sigmoid()


def ladder(height: int, width: int) -> list[tuple[int, int]]:
    """The sides of the maps from small to full: halved twice at least, and until both are small."""
    sides = [(height, width)]
    while len(sides) < 3 or max(sides[0]) > SMALL:
        sides.insert(0, (-(-sides[0][0] // 2), -(-sides[0][1] // 2)))
    return sides


def make_latent(features: int, size: int, generator: torch.Generator) -> Latent:
    latent = drawn(lambda: Latent(features, size), generator)
    nn.init.zeros_(latent.logvar.weight)
    return latent


def make_decoder(size: int, shape: tuple[int, int, int], encoder: nn.Module, generator: torch.Generator) -> Decoder:
    """The decoder to go with an encoder."""
    norm = "batch" if any(isinstance(m, BatchNorm) for m in encoder.modules()) else "group"
    return drawn(lambda: Decoder(size, shape, norm), generator)


def halves(net: nn.Module) -> tuple[Latent, Decoder]:
    """What was attached to the model."""
    return net.latent, net.decoder  # type: ignore[return-value]


@torch.no_grad()
def encode(net: Net, weights: Weights, x: Tensor) -> Tensor:
    """μ of some images, in evaluation mode and in pieces that bound the memory."""
    net.load(weights)
    net.eval()
    return torch.cat([halves(net)[0].mu(net.base(piece)) for piece in x.split(PIECE)])


@torch.no_grad()
def decode(net: Net, weights: Weights, z: Tensor) -> Tensor:
    """Images of some codes, likewise."""
    net.load(weights)
    net.eval()
    return torch.cat([halves(net)[1](piece) for piece in z.split(PIECE)])


class Mixture:
    """Real images once an epoch, and `quota` decoded ones of each old class; a class with fewer is repeated. `labels`
    are those of the decoded ones, on the CPU."""

    def __init__(self, rows: Tensors, real: int, quota: int, labels: Tensor) -> None:
        self.rows = rows
        self.real = real
        self.old = Balanced(labels, quota, rows["y"].device)
        self.replayed = len(self.old.labels)
        self.size = real + self.replayed

    def epoch(self, rng: torch.Generator) -> dict[str, Tensor]:
        every = torch.arange(self.real, device=self.rows["y"].device)
        index = torch.cat([every, self.real + self.old.draw(rng)])
        return {k: v[index] for k, v in self.rows.items()}
