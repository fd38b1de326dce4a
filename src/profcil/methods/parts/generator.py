"""A generator of images, trained without data: only the frozen global model is used.

A BatchNorm layer stores the mean and the variance of every input channel. A generated image replaces an example that
may not be stored. It should reproduce these statistics in every layer, and the model should assign it to a class
(Yin et al., 2020). TARGET and MFCL train generators like this, with different losses on the same statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from profcil.data.bundle import Inputs
from profcil.engine.channel import ServerState
from profcil.model.layers import BatchNorm, drawn
from profcil.model.net import MODEL, Net, Weights

ChannelMoments = tuple[Tensor, Tensor]  # mean and variance of every channel

SMALL_SIDE = 16  # images with a shorter side are small: one upsampling instead of two, and fewer channels
BLUR = (1.0, 4.0, 6.0, 4.0, 1.0)  # a 5-tap Gaussian, divided by its sum before use


class Generator(nn.Module):
    """Linear → norm → (upsample → convolution → norm → leaky ReLU) twice → convolution → sigmoid: images in [0, 1].
    For small images only one of the two upsamplings changes the size."""

    def __init__(self, latent: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, rows, columns = shape
        small = min(rows, columns) < SMALL_SIDE
        factors = (2, 2, 1) if small else (4, 2, 1)
        self.sizes = [(ceil(rows / factor), ceil(columns / factor)) for factor in factors]
        self.latent = latent
        first_rows, first_columns = self.sizes[0]
        self.first = nn.Linear(latent, width * first_rows * first_columns)
        self.norm = BatchNorm(width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = BatchNorm(width)
        self.conv2 = nn.Conv2d(width, width // 2, 3, padding=1)
        self.norm2 = BatchNorm(width // 2)
        self.out = nn.Conv2d(width // 2, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, *self.sizes[0])
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)  # the fastest layout on a GPU
        x = self.norm(x)
        x = self.conv1(upsample(x, self.sizes[1]))
        x = F.leaky_relu(self.norm1(x), 0.2)
        x = self.conv2(upsample(x, self.sizes[2]))
        x = F.leaky_relu(self.norm2(x), 0.2)
        images: Tensor = self.out(x).sigmoid()
        return images

    def noise(self, count: int, rng: torch.Generator) -> Tensor:
        """Latent vectors for `count` images, on the device of `rng`."""
        return torch.randn(count, self.latent, generator=rng, device=rng.device)

    def images(self, z: Tensor) -> Tensor:
        """Images as bytes."""
        return as_bytes(self(z))


def upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Nearest-neighbour upsampling. On a GPU, doubling both sides is a copy: F.interpolate would compute in float32."""
    n, c, h, w = x.shape
    doubles = size == (2 * h, 2 * w)
    if not (x.is_cuda and doubles):
        return F.interpolate(x, size)
    channels_last = x.permute(0, 2, 3, 1)
    doubled = channels_last[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return doubled.reshape(n, *size, c).permute(0, 3, 1, 2)


def make_generator(latent: int, like: Inputs, width: int, rng: torch.Generator) -> Generator:
    """A generator of images of the shape of `like`. Width 0 means 128 channels, or 32 for small images."""
    channels, rows, columns = like[0].shape[1:]
    width = width or (32 if is_small(like) else 128)
    return drawn(lambda: Generator(latent, (channels, rows, columns), width), rng)


def generate_images(net: Net, generator: Generator, count: int, rng: torch.Generator) -> Tensor:
    """Random images of a generator that is part of the loaded model. In evaluation mode no image depends on the
    others."""
    return map_in_precision(net, generator, generator.images, generator.noise(count, rng))


def is_small(like: Inputs) -> bool:
    return min(like[0].shape[2:]) < SMALL_SIDE


def as_bytes(x: Tensor) -> Tensor:
    """Numbers in [0, 1] as bytes: the format in which images are stored and sent."""
    return (x.float() * 255).round().to(torch.uint8)


def load_frozen(net: Net, weights: Weights) -> Net:
    """Loads a teacher: these weights, in evaluation mode, without gradients for any of its tensors."""
    net.load(weights)
    net.eval()
    return net.requires_grad_(False)


def map_in_precision(net: Net, key: object, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies a function of the loaded model to many rows, in the precision in which the model is trained."""

    def apply(chunk: Tensor) -> Tensor:
        with net.autocast():
            return function(chunk)

    return net.map_rows(apply, rows, key)


def make_adam(*groups: dict[str, Any], betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Adam:
    """Adam whose steps can be recorded as a CUDA graph: its step count is a tensor on the device."""
    parameter = groups[0]["params"][0]
    return torch.optim.Adam(groups, betas=betas, fused=True, capturable=parameter.is_cuda)


def apply_gradients(optimiser: torch.optim.Optimizer, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """One optimiser step with these gradients. The parameters have no gradients afterwards."""
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.contiguous()  # the fused kernels ignore strides
    optimiser.step()
    optimiser.zero_grad()


def is_outdated(state: ServerState, name: str) -> bool:
    """Whether the model has changed since this block was computed from it, or the block does not exist yet."""
    block = state.get(name)
    if block is None:
        return True
    versions = [state.blocks[b].version for b in MODEL]
    return max(versions) > block.version


def explain_missing_batchnorm(method: str, net: Net) -> str:
    """Why a method that needs the BatchNorm statistics of images cannot run with this model; empty if it can."""
    modality = net.facts.modality
    has_batchnorm = any(isinstance(m, nn.BatchNorm2d) for m in net.base.modules())
    if modality == "image" and has_batchnorm:
        return ""
    advice = "set model.norm=batch" if modality == "image" else f"choose a method that is made for {modality}"
    return f"{method} needs BatchNorm statistics of an image encoder; {advice}"


class BatchNormStatistics:
    """A context manager that records the moments of the inputs of each BatchNorm layer, in the latest forward pass.

    The moments of all layers are concatenated into one vector. `layer_mask` has one row per layer and says which
    entries belong to it. On a GPU a few operations on one vector cost less than the same for each of twenty layers."""

    def __init__(self, base: nn.Module) -> None:
        self.layers = [m for m in base.modules() if isinstance(m, nn.BatchNorm2d)]
        self.recorded: dict[nn.Module, ChannelMoments] = {}
        self.hooks: list[RemovableHandle] = []
        running = [(m.running_mean.clone(), m.running_var.clone()) for m in self.layers]  # type: ignore[union-attr]
        self.running: ChannelMoments = concatenate(running)
        rows = [torch.ones_like(mean) for mean, _ in running]
        self.layer_mask = torch.block_diag(*rows)

    def __enter__(self) -> BatchNormStatistics:
        for layer in self.layers:
            if isinstance(layer, BatchNorm):
                layer.observer = self.record
            else:
                hook = layer.register_forward_pre_hook(lambda own, x: self.record(own, x[0]))
                self.hooks.append(hook)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            if isinstance(layer, BatchNorm):
                layer.observer = None
        while self.hooks:
            self.hooks.pop().remove()

    def record(self, layer: nn.Module, x: Tensor, known: ChannelMoments | None = None) -> None:
        """Records the moments of a layer's input. `known` are these moments if a kernel has already computed them."""
        self.recorded[layer] = known or channel_moments(x)

    @property
    def batch(self) -> ChannelMoments:
        """The recorded moments of all layers."""
        return concatenate([self.recorded[layer] for layer in self.layers])


def channel_moments(x: Tensor) -> ChannelMoments:
    """Mean and variance of every channel over a batch of images."""
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean, var


def concatenate(moments: Sequence[ChannelMoments]) -> ChannelMoments:
    means, variances = zip(*moments, strict=True)
    return torch.cat(means), torch.cat(variances)


def moment_distance(batch: ChannelMoments, running: ChannelMoments, layer_mask: Tensor) -> Tensor:
    """Σ_layers ‖μ̂ − μ‖ + ‖σ̂² − σ²‖, the distance of TARGET."""
    squares = [(b - r).square() for b, r in zip(batch, running, strict=True)]
    by_layer = torch.stack(squares) @ layer_mask.T
    return by_layer.clamp(min=1e-12).sqrt().sum()  # the gradient of √ is infinite at zero


def gaussian_divergence(
    batch: ChannelMoments, running: ChannelMoments, layer_mask: Tensor, least: float = 1e-6
) -> Tensor:
    """The mean over layers of the channels' mean KL(N(μ, σ²) ‖ N(μ̂, σ̂²)), the divergence of MFCL. Hats mark the batch.
    `least` is added to all variances."""
    batch_mean, batch_var = batch
    running_mean, running_var = running
    batch_var = batch_var + least
    running_var = running_var + least
    log_ratio = (batch_var / running_var).log()
    square = (running_mean - batch_mean).square()
    each = 0.5 * log_ratio - 0.5 * (1 - (running_var + square) / batch_var)
    by_layer = (layer_mask @ each) / layer_mask.sum(1)
    return by_layer.mean()


def blur_kernel(channels: int, device: torch.device) -> Tensor:
    """The 5x5 Gaussian kernel of `roughness`."""
    taps = torch.tensor(BLUR, device=device) / sum(BLUR)
    kernel = taps[:, None] * taps
    return kernel.expand(channels, 1, -1, -1)


def roughness(x: Tensor, kernel: Tensor) -> Tensor:
    """Mean squared difference between images and their blurred versions."""
    padded = F.pad(x, (2, 2, 2, 2), mode="reflect")
    smooth = F.conv2d(padded, kernel, groups=x.shape[1])
    return (x - smooth).square().mean()


def imbalance(logits: Tensor) -> Tensor:
    """1 − H(p̄)/log K of a batch's mean prediction p̄: 0 if all K classes are equally likely, 1 if only one occurs."""
    mean = logits.softmax(1).mean(0).clamp(min=1e-12)
    if len(mean) < 2:
        return mean.sum() * 0
    negative_entropy = (mean * mean.log()).sum()
    return 1 + negative_entropy / log(len(mean))
