"""The kernels of updates against the plain rules, without a GPU: see `run_interpreted`."""

from __future__ import annotations

PROGRAM = """
import itertools, torch
from types import SimpleNamespace
from profcil.config import TrainSettings
from profcil.accel.graphs.updates import Descent, MaskedDescent, MaskedRule, Update

torch.manual_seed(0)
size = 5_001
rules = TrainSettings(optimiser="sgd"), TrainSettings(optimiser="sgd", momentum=0.0, weight_decay=0.0, clip=0.0)
for settings, pulled, filters in itertools.product(rules, (0, 4_100, size), (slice(0, 0), slice(33, 4_999))):
    start, anchor, *slopes = (torch.randn(size) for _ in range(4))
    phase, rows, lows = SimpleNamespace(settings=settings, proximal=0.3), [], []
    for made in (Update, Descent):
        row, low = start.clone(), start.clone()
        update = made(phase, row, low, anchor[:pulled] if pulled else None, filters)
        for slope in slopes:
            update.step(slope.clone(), -slope)
        rows.append(row), lows.append(low)
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
    assert torch.equal(lows[1], rows[1]) and not torch.equal(rows[0], start)
for settings, proximal in itertools.product(rules, (0.0, 0.3)):
    start, *slopes = (torch.randn(3, size + 7) for _ in range(4))
    rows = [start.clone(), start.clone()]
    for made, matrix in zip((MaskedRule, MaskedDescent), rows, strict=True):
        update = made(settings, matrix[:, :size], proximal)
        update.reset()
        for done, slope in enumerate(slopes):
            active = torch.tensor([3, 2, 1]) > done
            update.step(slope[:, :size].masked_fill(~active[:, None], torch.nan).contiguous(), active)
    torch.testing.assert_close(*rows, rtol=0, atol=1e-5)
    assert not torch.equal(rows[0], start)
"""


def test_the_kernels_of_an_update_do_what_the_plain_one_does(run_interpreted):
    run_interpreted(PROGRAM)
