"""The kernels of updates against the plain rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profcil.accel.cuda_graphs.updates import FusedMaskedUpdate, FusedUpdate, MaskedUpdate, Update
from profcil.config import TrainSettings

SIZE = 5_001
RULES = [TrainSettings(optimiser="sgd"), TrainSettings(optimiser="sgd", momentum=0.0, weight_decay=0.0, clip=0.0)]
rules = pytest.mark.parametrize("settings", RULES, ids=["momentum and clipping", "plain"])


@rules
@pytest.mark.parametrize("pulled", [0, 4_100, SIZE])
@pytest.mark.parametrize("filters", [slice(0, 0), slice(33, 4_999)], ids=str)
def test_the_kernels_of_an_update_do_what_the_plain_one_does(settings, pulled, filters):
    start, anchor, *gradients = (torch.randn(SIZE) for _ in range(4))
    phase: Any = SimpleNamespace(settings=settings, proximal=0.3)
    rows, lows = [], []
    for made in (Update, FusedUpdate):
        row, low = start.clone(), start.clone()
        update = made(phase, row, low, anchor[:pulled] if pulled else None, filters)
        for gradient in gradients:
            update.step(gradient.clone(), -gradient)
        rows.append(row)
        lows.append(low)
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
    assert torch.equal(lows[1], rows[1]) and not torch.equal(rows[0], start)


@rules
@pytest.mark.parametrize("proximal", [0.0, 0.3])
def test_the_kernels_of_a_stack_s_update_do_what_the_plain_one_does(settings, proximal):
    start, *gradients = (torch.randn(3, SIZE + 7) for _ in range(4))
    rows = [start.clone(), start.clone()]
    for made, matrix in zip((MaskedUpdate, FusedMaskedUpdate), rows, strict=True):
        update = made(settings, matrix[:, :SIZE], proximal)
        update.reset()
        for done, gradient in enumerate(gradients):
            active = torch.tensor([3, 2, 1]) > done
            update.step(gradient[:, :SIZE].masked_fill(~active[:, None], torch.nan).contiguous(), active)
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
    assert not torch.equal(rows[0], start)
