"""Layers of several clients side by side against torch's own, one client after another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profcil.accel.cpu import grouped_layers
from profcil.accel.cpu.stacked_convnet import StackedConvNet
from profcil.data.loading import load_bundle
from profcil.encoders import convnet
from profcil.model.layers import NORMS

CLIENTS, BATCH, INTO, OUT = 3, 5, 2, 8


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apart(one: list[Tensor], two: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("clients", [1, CLIENTS])
@pytest.mark.parametrize("scales", ["positive", "some negative", "all negative"])
def test_the_layer_and_its_gradients_are_those_of_torch(scales: str, clients: int, size: int) -> None:
    x, weight = drawn(0, clients, BATCH, INTO, size, size).requires_grad_(), drawn(1, clients, OUT, INTO, 3, 3)
    scale, shift = drawn(2, clients, OUT), drawn(3, clients, OUT).requires_grad_()
    scale = {"positive": scale.abs(), "some negative": scale, "all negative": -scale.abs()}[scales]
    tensors = [x, weight.requires_grad_(), scale.requires_grad_(), shift]
    norm = nn.GroupNorm(4, OUT)
    ours = grouped_layers.layer(
        grouped_layers.joined_channels(x), {"weight": weight}, norm, {"weight": scale, "bias": shift}
    )
    ours = ours.unflatten(1, (clients, OUT)).transpose(0, 1)
    each = zip(x, weight, scale, shift, strict=True)
    torchs = torch.stack(
        [F.max_pool2d(F.relu(F.group_norm(F.conv2d(i, w, padding=1), 4, s, b)), 2) for i, w, s, b in each]
    )
    gradient = drawn(4, *torchs.shape)
    one, two = (list(torch.autograd.grad(y, tensors, gradient)) for y in (ours, torchs))
    assert apart([ours, *one], [torchs, *two]) < 1e-10


def test_channels_without_variance_are_normalised() -> None:
    """Rounding may make a difference of squares negative."""
    x = torch.linspace(1, 900, 64).view(1, 64, 1, 1, 1).expand(-1, -1, -1, 8, 8)
    weight, ones = torch.zeros(1, 2, 1, 3, 3), torch.ones(1, 2)
    weight[..., 1, 1] = 1
    y = grouped_layers.layer(
        grouped_layers.joined_channels(x), {"weight": weight}, nn.GroupNorm(1, 2), {"weight": ones, "bias": ones}
    )
    assert bool(y.isfinite().all()) and float((y - 1).abs().max()) < 0.1


@pytest.mark.parametrize("norm", sorted(NORMS))
def test_the_encoder_over_clients_is_the_encoder_of_each(norm: str) -> None:
    """Features, gradients of every parameter, and running statistics."""
    bundle = load_bundle("digits", Path("nowhere"), 0)
    nets = [
        convnet.build(bundle, generator=torch.Generator().manual_seed(i), norm=norm, width=4) for i in range(CLIENTS)
    ]
    for net in nets:
        net.__class__ = StackedConvNet
    names, x = (
        [k for k, _ in nets[0].named_parameters()],
        bundle.train.x[: CLIENTS * BATCH].view(CLIENTS, BATCH, 1, 8, 8),
    )
    own = {k: torch.stack([net.state_dict()[k] for net in nets]) for k in nets[0].state_dict()}
    leaves = [own[k].requires_grad_() for k in names]
    together, alone = nets[0].over_clients(own, x), torch.stack([net(i) for net, i in zip(nets, x, strict=True)])
    gradient = torch.randn(alone.shape, generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad(together, leaves, gradient)
    expected = torch.autograd.grad(alone, [p for net in nets for p in net.parameters()], gradient)
    by_name = [torch.stack(list(expected[i :: len(names)])) for i in range(len(names))]
    assert apart([together, *gradients], [alone, *by_name]) < 1e-4
    noted = [k for k in own if k not in names]
    assert bool(noted) == nets[0].mixes == (norm == "batch")
    assert all(torch.allclose(own[k], torch.stack([net.state_dict()[k] for net in nets]), atol=1e-6) for k in noted)
