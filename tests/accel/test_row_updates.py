"""Updates and clipping of a stack of clients against those of each client alone."""

from __future__ import annotations

import pytest
import torch

from profcil.accel.row_updates import RowOptimiser, clip_rows_
from profcil.config import TrainSettings
from profcil.engine.steps import Optimiser, clip_

RULES = [
    {"optimiser": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"optimiser": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.1},
    {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.1, "decay": "coupled"},
]


@pytest.mark.parametrize("rule", RULES)
def test_an_inactive_row_does_not_change_and_continues_as_a_single_client(rule):
    s, rng = TrainSettings(**rule), torch.Generator().manual_seed(0)
    start = torch.randn(2, 3, 3, generator=rng)
    stack, alone = start.clone(), [start[0].clone(), start[1].clone()]
    together, single = RowOptimiser(s, [stack]), [Optimiser(s, [t]) for t in alone]
    for rows in (2, 1, 1, 2, 2):
        g, before = torch.randn(2, 3, 3, generator=rng), stack.clone()
        for row in range(rows):
            single[row].step([g[row].clone()])
        together.step([g[:rows].clone()], rows)
        assert torch.equal(stack[rows:], before[rows:])
    assert torch.allclose(stack, torch.stack(alone), atol=1e-6)


def test_every_client_is_clipped_by_its_own_norm():
    g = torch.stack([torch.full((3,), 10.0), torch.full((3,), 0.1)])
    clip_rows_([g], 1.0)
    assert g[0].norm() == pytest.approx(1.0, abs=1e-4) and torch.equal(g[1], torch.full((3,), 0.1))


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_rows_are_clipped_as_single_clients_are(limit):
    rng = torch.Generator().manual_seed(0)
    grads = [torch.randn(3, 4, 2, generator=rng), torch.randn(3, 5, generator=rng)]
    alone = [[g[row].clone() for g in grads] for row in range(3)]
    clip_rows_(grads, limit)
    for row, own in enumerate(alone):
        clip_(own, limit)
        assert all(torch.allclose(g[row], one, atol=1e-6) for g, one in zip(grads, own, strict=True))


def test_clipping_keeps_nan_and_does_not_change_other_rows():
    g = torch.tensor([[1.0, torch.nan], [0.1, 0.2]])
    clip_rows_([g], 1.0)
    assert g[0].isnan().all() and torch.equal(g[1], torch.tensor([0.1, 0.2]))
