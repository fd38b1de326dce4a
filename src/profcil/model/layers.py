"""Parts that encoders share: normalisation, standardised inputs, initial values, and checks of their settings and data.

The state of a base encoder is averaged and sent, so it has floating-point tensors only.
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
FARTHEST = 10.0  # deviations from the mean beyond which the value of a column is cut


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm without the integer counter, which cannot be averaged. It also accepts one value per channel."""

    observer: Callable[..., None] | None = None  # called with this layer and its input in every forward pass

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_batches_tracked = None

    # BatchNorm2d's loader would add the missing counter to the state and then refuse it as unexpected.
    _load_from_state_dict = nn.Module._load_from_state_dict

    def forward(self, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(self, x)
        return self.normalise(x)

    def normalise(self, x: Tensor) -> Tensor:
        # One value per channel has no variance: then the running statistics are used and not updated.
        channels = x.shape[1]
        use_batch = self.training and x.numel() > channels
        mean = self.running_mean
        var = self.running_var
        momentum = float(self.momentum or 0)
        return F.batch_norm(x, mean, var, self.weight, self.bias, use_batch, momentum, self.eps)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": BatchNorm,
    # At most 32 groups, each of at least two channels: normalising one channel of one pixel always gives zero.
    "group": lambda channels: nn.GroupNorm(min(gcd(32, channels), max(1, channels // 2)), channels),
    "none": lambda channels: nn.Identity(),
}


def layers(norm: str, *allowed: str) -> Callable[[int], nn.Module]:
    """The constructor of normalisation layers with this name: number of channels -> layer."""
    if norm not in allowed:
        raise unknown("norm", norm, allowed)
    return NORMS[norm]


def unused(encoder: str, norm: str) -> None:
    """Refuses a normalisation setting for an encoder without normalisation layers."""
    if norm not in ("batch", "none"):
        raise ConfigError(
            f"norm '{norm}' changes nothing, because the {encoder} encoder has no normalisation layers; leave norm out"
        )


def sample(bundle: Bundle) -> tuple[Tensor, ...]:
    """The encoder's inputs for zero examples: their shapes and types."""
    no_rows = torch.empty(0, dtype=torch.long)
    return bundle.train.inputs(no_rows)


def expect(fits: bool, encoder: str, wants: str, bundle: Bundle) -> None:
    """Refuses a dataset if its inputs do not fit this encoder, and names one that fits."""
    if not fits:
        facts = bundle.facts
        has_other = facts.encoder not in ("", encoder)
        advice = f"choose {facts.encoder}" if has_other else "choose another encoder"
        raise ConfigError(f"the {encoder} encoder needs {wants}, but dataset '{facts.name}' has other inputs; {advice}")


def image_shape(bundle: Bundle, encoder: str) -> tuple[int, int, int]:
    """Channels, height and width of a dataset of images."""
    x = sample(bundle)[0]
    expect(x.dim() == 4, encoder, "images", bundle)
    channels, height, width = x.shape[1:]
    return channels, height, width


class Pixels(nn.Module):
    """Standardises the channels of images. Mean and deviation belong to the dataset, so they are not in the state."""

    mean: Tensor
    std: Tensor

    def __init__(self, bundle: Bundle, channels: int) -> None:
        super().__init__()
        means = len(bundle.mean)
        deviations = len(bundle.std)
        if not means == deviations == channels:
            given = f"{means} means and {deviations} deviations for {channels} channels"
            raise DataError(
                f"dataset '{bundle.facts.name}' has {given}; its loader must return one of each per channel"
            )
        mean = torch.tensor(bundle.mean).view(-1, 1, 1)
        std = torch.tensor(bundle.std).view(-1, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (unit(x) - self.mean) / self.std


class Columns(nn.Module):
    """Standardises the columns of a table. Mean and deviation belong to the dataset, so they are not in the state."""

    mean: Tensor
    std: Tensor

    def __init__(self, bundle: Bundle, columns: int) -> None:
        super().__init__()
        if not len(bundle.mean) == len(bundle.std) == columns:
            given = f"{len(bundle.mean)} means and {len(bundle.std)} deviations for {columns} columns"
            raise DataError(f"dataset '{bundle.facts.name}' has {given}; its loader must return one of each per column")
        self.register_buffer("mean", torch.tensor(bundle.mean), persistent=False)
        self.register_buffer("std", torch.tensor(bundle.std), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp(-FARTHEST, FARTHEST)


def unit(x: Tensor) -> Tensor:
    """Bytes scaled to [0, 1]; other types are unchanged."""
    if x.dtype != torch.uint8:
        return x
    return x.float() / 255


def distances_between(points: Tensor, others: Tensor) -> Tensor:
    """The Euclidean distance of each point to each other one, [points, others]."""
    if torch.compiler.is_exporting():  # ONNX has no such operation
        return (points[:, None] - others[None]).square().sum(2).sqrt()
    return torch.cdist(points, others)


def drawn(make: Callable[[], Module], generator: torch.Generator) -> Module:
    """Makes a module with weights drawn from this generator. torch's global random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        module = make()
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(part.weight, mode="fan_in", nonlinearity="relu", generator=generator)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module
