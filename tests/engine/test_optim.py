"""The update rules against torch's own optimisers."""

from __future__ import annotations

import pytest
import torch

from profcil.config import TrainSettings
from profcil.engine.steps import Optimiser, clip_

RULES = [
    {"optimiser": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"optimiser": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.1},
    {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.1, "decay": "coupled"},
]


def torchs(s: TrainSettings, p: torch.Tensor) -> torch.optim.Optimizer:
    if s.optimiser == "sgd":
        return torch.optim.SGD([p], lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    rule = torch.optim.AdamW if s.decay == "decoupled" else torch.optim.Adam
    return rule([p], lr=s.lr, weight_decay=s.weight_decay)


@pytest.mark.parametrize("rule", RULES)
def test_one_client_moves_as_with_torchs_optimiser_whatever_the_strides_of_its_gradients(rule):
    s, rng = TrainSettings(**rule), torch.Generator().manual_seed(0)
    p = torch.randn(4, 3, 2, 2, generator=rng)
    reference = p.clone().requires_grad_()
    ours, theirs = Optimiser(s, [p]), torchs(s, reference)
    for _ in range(5):
        g = torch.randn(4, 3, 2, 2, generator=rng)
        reference.grad = g.clone()
        theirs.step()
        ours.step([g.to(memory_format=torch.channels_last)])
    assert torch.allclose(p, reference.detach(), atol=1e-6)


def test_gradients_are_scaled_to_the_limit():
    flat = torch.full((4,), 10.0)
    clip_([flat], 1.0)
    assert flat.norm() == pytest.approx(1.0, abs=1e-4)


def test_a_gradient_within_the_limit_keeps_its_bits_and_one_beyond_is_scaled_with_all_others():
    within = [torch.tensor([0.3, 0.1]), torch.full((2, 2), 0.2).T]
    before = [g.clone() for g in within]
    clip_(within, 1.0)
    assert all(torch.equal(g, b) for g, b in zip(within, before, strict=True))
    clip_(within, 0.1)
    factors = torch.cat([(g / b).flatten() for g, b in zip(within, before, strict=True)])
    assert torch.allclose(factors, factors[0].expand(6)) and factors[0] < 0.5
    assert torch.cat([g.flatten() for g in within]).norm() == pytest.approx(0.1, abs=1e-5)


def test_clipping_hides_no_gradient_that_is_not_a_number():
    grads = [torch.tensor([1.0]), torch.tensor([torch.nan])]
    clip_(grads, 1.0)
    assert all(g.isnan().all() for g in grads)
