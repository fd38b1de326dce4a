"""The analytic gradients of several small networks, against autograd on each network alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from profcil.accel.cpu.convnet_gradient import layers_of, write_gradients
from profcil.accel.cpu.grouped_layers import joined_channels
from profcil.data.loading import load_bundle
from profcil.encoders import convnet
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Net

CLIENTS, BATCH = 3, 5


def nets(size: int) -> list[Net]:
    """In double precision, without parameters that are zero."""
    bundle = load_bundle("digits", Path("nowhere"), 0)
    bundle = replace(bundle, train=replace(bundle.train, x=bundle.train.x[:, :, :size, :size]))
    made = []
    for i in range(CLIENTS):
        rng = torch.Generator().manual_seed(i)
        net = Net(convnet.build(bundle, generator=rng, norm="group", width=4), bundle.facts, generator=rng)
        for p in net.parameters():
            p.data += 0.3 * torch.randn(p.shape, generator=rng)
        made.append(net.double())
    return made


@pytest.mark.parametrize("size", [8, 7])
def test_every_gradient_and_loss_is_that_of_autograd(size):
    each, rng = nets(size), torch.Generator().manual_seed(9)
    x = torch.rand(CLIENTS, BATCH, 1, size, size, generator=rng, dtype=torch.float64)
    y, allowed = torch.randint(0, 6, (CLIENTS, BATCH), generator=rng), torch.arange(10).expand(CLIENTS, -1) < 6
    losses = [cross_entropy(net(x[i]), y[i], allowed[i]) for i, net in enumerate(each)]
    expected = [torch.autograd.grad(loss, net.trainable(MODEL)) for loss, net in zip(losses, each, strict=True)]
    names = [f"{b}.{k}" for b in MODEL for k, _ in getattr(each[0], b).named_parameters()]
    own = [dict(net.named_parameters()) for net in each]
    weights = {n: torch.stack([p[n].detach() for p in own]) for n in names}
    into = {n: torch.full_like(t, torch.nan) for n, t in weights.items()}
    images = joined_channels(each[0].base.pixels(x))
    found = write_gradients(weights, into, layers_of(each[0].base, images, allowed), images, y.unsqueeze(2))
    torch.testing.assert_close(found, torch.stack([loss.detach() for loss in losses]))
    by_name: list[Tensor] = [torch.stack(parts) for parts in zip(*expected, strict=True)]
    for name, gradient in zip(names, by_name, strict=True):
        torch.testing.assert_close(into[name], gradient, msg=lambda message, name=name: f"{name}: {message}")
        assert float(gradient.abs().max()) > 1e-6
