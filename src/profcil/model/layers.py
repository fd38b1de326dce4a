"""What encoders share besides their layers: normalisation, initial values, and the checks of what they are given.

A base encoder's state is averaged, counted and sent as it is, so it holds floating tensors only.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.data.bundle import Bundle
from profcil.errors import ConfigError, DataError, unknown

Module = TypeVar("Module", bound=nn.Module)


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm whose state can be averaged: no integer counter, and it can be trained on a single value."""

    observer: Callable[..., None] | None = None  # called with this layer and its input in every pass

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None

    # torch's own loader puts the missing counter back into a plain dict of tensors and then calls it unexpected.
    _load_from_state_dict = nn.Module._load_from_state_dict

    def forward(self, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, x)
        return self.normalise(x)

    def normalise(self, x: Tensor) -> Tensor:
        # One value per channel has no spread: the running statistics stand in for it and are left alone.
        learn = self.training and x.numel() > x.shape[1]
        mean, var, momentum = self.running_mean, self.running_var, float(self.momentum or 0)
        return F.batch_norm(x, mean, var, self.weight, self.bias, learn, momentum, self.eps)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": BatchNorm,
    # At most 32 groups, of two channels at least: alone, a channel of one pixel would always be zero.
    "group": lambda channels: nn.GroupNorm(min(gcd(32, channels), max(1, channels // 2)), channels),
    "none": lambda channels: nn.Identity(),
}


def layers(norm: str, *allowed: str) -> Callable[[int], nn.Module]:
    """The maker of normalisation layers behind a name: number of channels -> layer."""
    if norm not in allowed:
        raise unknown("norm", norm, allowed)
    return NORMS[norm]


def unused(encoder: str, norm: str) -> None:
    """For encoders without normalisation layers: a setting that would change nothing is an error."""
    if norm not in ("batch", "none"):
        raise ConfigError(f"norm '{norm}' changes nothing: the {encoder} encoder has no such layers; leave norm out")


def sample(bundle: Bundle) -> tuple[Tensor, ...]:
    """Inputs for no example at all: what an encoder will be given, as far as shapes and types tell."""
    return bundle.train.inputs(torch.empty(0, dtype=torch.long))


def expect(fits: bool, encoder: str, wants: str, bundle: Bundle) -> None:
    """Refuse a dataset whose inputs this encoder cannot read, and name the encoder that can."""
    if not fits:
        facts = bundle.facts
        advice = f"choose {facts.encoder}" if facts.encoder not in ("", encoder) else "choose another encoder"
        raise ConfigError(f"the {encoder} encoder reads {wants}, which dataset '{facts.name}' does not hold; {advice}")


def image_shape(bundle: Bundle, encoder: str) -> tuple[int, int, int]:
    """Channels, height and width of a dataset of images."""
    x = sample(bundle)[0]
    expect(x.dim() == 4, encoder, "images", bundle)
    channels, height, width = x.shape[1:]
    return channels, height, width


class Pixels(nn.Module):
    """Bytes, or numbers in [0, 1], to standardised channels. Facts of the dataset, hence not part of the state."""

    mean: Tensor
    std: Tensor

    def __init__(self, bundle: Bundle, channels: int) -> None:
        super().__init__()
        if not len(bundle.mean) == len(bundle.std) == channels:
            given = f"{len(bundle.mean)} means and {len(bundle.std)} deviations for {channels} channels"
            raise DataError(
                f"dataset '{bundle.facts.name}' gives {given}; its loader must give one of each per channel"
            )
        self.register_buffer("mean", torch.tensor(bundle.mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(bundle.std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (unit(x) - self.mean) / self.std


def unit(x: Tensor) -> Tensor:
    """Bytes as numbers in [0, 1]; what is already a number passes through."""
    return x.float() / 255 if x.dtype == torch.uint8 else x


def drawn(make: Callable[[], Module], generator: torch.Generator) -> Module:
    """Make a module and draw its weights from this generator alone; torch's global random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        module = make()
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity="relu", generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
