"""Images from noise, without data: a generator, and what a frozen model tells about the data it was trained on.

A BatchNorm layer remembers the mean and variance of every channel that entered it. Images under which a layer meets
those again, and which the model puts into a class, are the stand-in for examples that nobody may keep (Yin et al.,
2020). TARGET and MFCL make them so, with different losses on the same statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from profcil.data.bundle import Inputs
from profcil.engine.payload import ServerState
from profcil.model.layers import BatchNorm, drawn
from profcil.model.net import MODEL, Net, Weights

Moments = tuple[Tensor, Tensor]  # mean and variance of every channel

SMALL = 16  # pixels of a side below which a generator doubles once and is narrower
BLUR = (1.0, 4.0, 6.0, 4.0, 1.0)  # a 5-tap Gaussian, to be divided by its sum


class Generator(nn.Module):
    """Linear → norm → (double → convolution → norm → leaky ReLU) twice → convolution → sigmoid: images in [0, 1].
    Very small images are doubled once only."""

    def __init__(self, latent: int, shape: tuple[int, int, int], width: int) -> None:
        super().__init__()
        channels, height, wide = shape
        shrink = (2, 2) if min(height, wide) < SMALL else (4, 2)
        self.sizes = [(-(-height // s), -(-wide // s)) for s in (*shrink, 1)]
        self.latent = latent
        self.first = nn.Linear(latent, width * self.sizes[0][0] * self.sizes[0][1])
        self.norm = BatchNorm(width)
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1), BatchNorm(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width // 2, 3, padding=1), BatchNorm(width // 2)
        self.out = nn.Conv2d(width // 2, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.first(z).view(len(z), -1, *self.sizes[0])
        x = self.norm(x.contiguous(memory_format=torch.channels_last) if x.is_cuda else x)  # what a GPU is fastest with
        x = F.leaky_relu(self.norm1(self.conv1(enlarged(x, self.sizes[1]))), 0.2)
        x = F.leaky_relu(self.norm2(self.conv2(enlarged(x, self.sizes[2]))), 0.2)
        return self.out(x).sigmoid()

    def noise(self, count: int, rng: torch.Generator) -> Tensor:
        """Latent vectors for so many images, drawn where `rng` lives."""
        return torch.randn(count, self.latent, generator=rng, device=rng.device)

    def images(self, z: Tensor) -> Tensor:
        return as_bytes(self(z))


def enlarged(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Every pixel repeated. On a GPU by a copy, where both sides double: the library would do it in float32."""
    n, c, h, w = x.shape
    if not x.is_cuda or size != (2 * h, 2 * w):
        return F.interpolate(x, size)
    last = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(n, h, 2, w, 2, c)
    return last.reshape(n, *size, c).permute(0, 3, 1, 2)


def make_generator(latent: int, like: Inputs, width: int, rng: torch.Generator) -> Generator:
    """A generator of images like these; width 0 is 128, or 32 for very small images."""
    channels, height, wide = like[0].shape[1:]
    width = width or (32 if is_small(like) else 128)
    return drawn(lambda: Generator(latent, (channels, height, wide), width), rng)


def samples(net: Net, generator: Generator, count: int, rng: torch.Generator) -> Tensor:
    """Images drawn by a generator of the loaded model. In evaluation mode none depends on those drawn beside it."""
    return asked(net, generator, generator.images, generator.noise(count, rng))


def is_small(like: Inputs) -> bool:
    return min(like[0].shape[2:]) < SMALL


def as_bytes(x: Tensor) -> Tensor:
    """Numbers in [0, 1] as bytes, the way images are stored and sent."""
    return (x.float() * 255).round().to(torch.uint8)


def frozen(net: Net, weights: Weights) -> Net:
    """The skeleton as a teacher: these weights, evaluation mode, no gradient for any of its tensors."""
    net.load(weights)
    net.eval()
    return net.requires_grad_(False)


def half(net: Net) -> AbstractContextManager:
    """The precision in which clients train this model, for what a server computes with it."""
    return net.autocast()


def asked(net: Net, key: object, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """A function of the loaded model for many rows, each for itself, in the model's precision."""

    def answer(chunk: Tensor) -> Tensor:
        with net.autocast():
            return function(chunk)

    return net.map_rows(answer, rows, key)


def made_adam(*groups: dict, betas: tuple[float, float] = (0.9, 0.999)) -> torch.optim.Adam:
    """Adam in a form of which steps can be recorded: how many it has taken is a number on the device."""
    return torch.optim.Adam(groups, betas=betas, fused=True, capturable=groups[0]["params"][0].is_cuda)


def descend(optimiser: torch.optim.Optimizer, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """One step down these gradients; none is left behind on the parameters."""
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.contiguous()  # kernels read memory in order, without strides
    optimiser.step()
    optimiser.zero_grad()


def outdated(state: ServerState, name: str) -> bool:
    """Whether the model has moved since this block was made from it, or there is none yet."""
    made = state.get(name)
    return made is None or any(state.blocks[b].version > made.version for b in MODEL)


def lacking(method: str, net: Net) -> str:
    """Why a method that reads BatchNorm statistics of images cannot run with this model; empty where it can."""
    given = net.facts.modality
    if given == "image" and any(isinstance(m, nn.BatchNorm2d) for m in net.base.modules()):
        return ""
    advice = "set model.norm=batch" if given == "image" else f"choose a method that is made for {given}"
    return f"{method} needs BatchNorm statistics of an image encoder; {advice}"


class Statistics:
    """While entered, notes the moments of what reaches each BatchNorm layer of an encoder in its latest pass.

    Moments of all layers lie one after another in one vector, and `layer` tells them apart, a row a layer: on a GPU a
    few operations on one vector cost less than as many on each of twenty layers."""

    def __init__(self, base: nn.Module) -> None:
        self.layers = [m for m in base.modules() if isinstance(m, nn.BatchNorm2d)]
        self.noted: dict[nn.Module, Moments] = {}
        self.hooks: list[RemovableHandle] = []
        known = [(m.running_mean.clone(), m.running_var.clone()) for m in self.layers]  # type: ignore[union-attr]
        self.learned: Moments = in_line(known)
        self.layer = torch.block_diag(*(torch.ones_like(mean) for mean, _ in known))

    def __enter__(self) -> Statistics:
        for layer in self.layers:
            if isinstance(layer, BatchNorm):
                layer.observer = self.note
            else:
                self.hooks.append(layer.register_forward_pre_hook(lambda own, x: self.note(own, x[0])))
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            if isinstance(layer, BatchNorm):
                layer.observer = None
        while self.hooks:
            self.hooks.pop().remove()

    def note(self, layer: nn.Module, x: Tensor, known: Moments | None = None) -> None:
        """Of what reaches a layer; its moments may be known already, by the kernel that has read it."""
        self.noted[layer] = known or moments(x)

    @property
    def batch(self) -> Moments:
        return in_line([self.noted[layer] for layer in self.layers])


def moments(x: Tensor) -> Moments:
    """Mean and variance of every channel over a batch of images."""
    var, mean = torch.var_mean(x.float(), (0, 2, 3), correction=0)
    return mean, var


def in_line(moments: Sequence[Moments]) -> Moments:
    means, variances = zip(*moments, strict=True)
    return torch.cat(means), torch.cat(variances)


def distance(batch: Moments, learned: Moments, layer: Tensor) -> Tensor:
    """Σ_layers ‖μ̂ − μ‖ + ‖σ̂² − σ²‖, TARGET's measure."""
    squares = torch.stack([(b - known).square() for b, known in zip(batch, learned, strict=True)])
    return (squares @ layer.T).clamp(min=1e-12).sqrt().sum()  # a root has no slope at zero


def divergence(batch: Moments, learned: Moments, layer: Tensor, least: float = 1e-6) -> Tensor:
    """Mean over layers of the channels' mean KL(N(μ, σ²) ‖ N(μ̂, σ̂²)), MFCL's measure; hats are the batch's."""
    (m, v), (rm, rv) = batch, learned
    v, rv = v + least, rv + least
    each = 0.5 * (v / rv).log() - 0.5 * (1 - (rv + (rm - m).square()) / v)
    return ((layer @ each) / layer.sum(1)).mean()


def blur(channels: int, device: torch.device) -> Tensor:
    """The 5x5 Gaussian kernel that `roughness` smooths by."""
    taps = torch.tensor(BLUR, device=device) / sum(BLUR)
    return (taps[:, None] * taps).expand(channels, 1, -1, -1)


def roughness(x: Tensor, kernel: Tensor) -> Tensor:
    """Mean squared difference between images and their smoothed selves."""
    smooth = F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, groups=x.shape[1])
    return (x - smooth).square().mean()


def imbalance(logits: Tensor) -> Tensor:
    """1 − H(p̄)/log K of a batch's mean prediction p̄: 0 where all K classes are equally likely, 1 for a single one."""
    mean = logits.softmax(1).mean(0).clamp(min=1e-12)
    return 1 + (mean * mean.log()).sum() / log(len(mean)) if len(mean) > 1 else mean.sum() * 0
