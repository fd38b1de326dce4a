"""An epoch in C against the one that is written down, for sizes that fill vectors and tiles, and for others."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from profcil.accel.cpu import adapter_head_c, adapter_head_epoch
from profcil.accel.cpu.adapter_head_epoch import EpochState, prepared
from profcil.accel.cpu.adapter_head_gradient import Classification
from profcil.config import TrainSettings
from profcil.engine.phases import Features, Train, cut
from profcil.engine.steps import Rule
from profcil.model.net import TAIL, Weights

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no compiler")


def phase_of(width: int, classes: int, rows: int, **train: object) -> Train:
    rng = torch.Generator().manual_seed(width)
    narrow = max(1, width // 4)
    shapes = {"down": (narrow, width), "down_bias": (narrow,), "up": (width, narrow), "up_bias": (width,)}
    shapes |= {"scale": (width,), "shift": (width,)}
    draw = {k: torch.randn(shape, generator=rng) * width**-0.5 for k, shape in shapes.items()}
    weights: Weights = {"adapter": draw, "head": {"weight": torch.randn(classes, width, generator=rng) * width**-0.5}}
    allowed = torch.arange(classes) % 5 != 1
    y = torch.nonzero(allowed).flatten()[torch.randint(0, int(allowed.sum()), (rows,), generator=rng)]
    source = Features(2 * torch.randn(rows, width, generator=rng) + 1, y)
    settings = TrainSettings(**{"optimiser": "adam", "lr": 0.01, **train})  # type: ignore[arg-type]
    return Train("rehearse", 0, weights, TAIL, torch.sum, source, settings, 1, 0, constants={"allowed": allowed})


def begun(phase: Train) -> tuple[EpochState, Rule, Tensor]:
    _, ground, rule, place = prepared(phase, Classification.order(phase.constants))
    return ground, rule, place[phase.source.y]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "classes", "batch"),
    [(384, 150, 64), (64, 7, 64), (65, 33, 20), (3, 2, 1), (17, 100, 16), (100, 9, 130), (48, 64, 63)],
)
def test_losses_and_weights_are_those_of_the_written_steps(width, classes, batch):
    phase = phase_of(width, classes, 3 * batch + 1, batch=batch, weight_decay=0.01)
    index = cut(phase.source.size, batch, torch.Generator().manual_seed(1))
    (written, rule, y), (ours, *_), (start, *_) = begun(phase), begun(phase), begun(phase)
    u = phase.source.features  # type: ignore[attr-defined]
    expected = adapter_head_epoch.run_epoch(written, u, y, index, rule, 0.0, 5.0, True).squeeze(1)
    take = adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, batch, 0.0, 5.0)
    losses = take(u, y, index, True)
    assert torch.allclose(losses[0], expected[0], rtol=3e-6, atol=3e-6)  # then rounding is amplified
    assert torch.allclose(losses, expected, rtol=1e-4, atol=1e-5)
    moved = (written.vector[0] - start.vector[0]).norm()
    assert (ours.vector[0] - written.vector[0]).norm() < 2e-4 * moved
    assert len(take(u, y, index, False)) == 0 and torch.isfinite(ours.vector[0]).all()


def test_a_feature_that_is_nearly_nothing_moves_its_weights_as_it_should():
    """Adam moves a weight with tiny gradients as far as any other, so their relative error has to be small."""
    phase = phase_of(32, 6, 40, batch=8)
    u = phase.source.features  # type: ignore[attr-defined]
    u[:, 3] *= 1e-6
    index = cut(40, 8, torch.Generator().manual_seed(1))
    for weights in ("up", "up_bias"):
        phase.weights["adapter"][weights].zero_()
    (written, rule, y), (ours, *_) = begun(phase), begun(phase)
    adapter_head_epoch.run_epoch(written, u, y, index[:1], rule, 0.0, 5.0, False)
    adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, 8, 0.0, 5.0)(u, y, index[:1], False)
    assert (ours.vector[0] - written.vector[0]).abs().max() < 1e-6 < rule.lr


def test_large_scores_neither_overflow_nor_lose_their_loss():
    phase = phase_of(32, 6, 40, batch=8)
    phase.weights["head"]["weight"].mul_(1e3)
    index = cut(40, 8, torch.Generator().manual_seed(1))
    (written, rule, y), (ours, *_) = begun(phase), begun(phase)
    u = phase.source.features  # type: ignore[attr-defined]
    expected = adapter_head_epoch.run_epoch(written, u, y, index, rule, 0.0, 5.0, True).squeeze(1)
    losses = adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, 8, 0.0, 5.0)(u, y, index, True)
    assert expected.max() > 100 and torch.allclose(losses, expected, rtol=1e-3, atol=1e-2)


def test_what_is_no_number_stays_none():
    """So that whoever looks at the result of a phase sees it."""
    phase = phase_of(32, 6, 40, batch=8)
    ground, rule, y = begun(phase)
    u = phase.source.features.clone()  # type: ignore[attr-defined]
    u[3, 5] = torch.nan
    losses = adapter_head_c.CompiledEpochs(adapter_head_c.library(), ground, rule, 8, 0.0, 5.0)(
        u, y, cut(40, 8, torch.Generator()), True
    )
    assert losses.isnan().any() and ground.vector[0].isnan().any()


def test_a_label_that_does_not_compete_is_refused_and_nothing_is_moved():
    phase = phase_of(32, 6, 40, batch=8)
    ground, rule, y = begun(phase)
    take, before = (
        adapter_head_c.CompiledEpochs(adapter_head_c.library(), ground, rule, 8, 0.0, 5.0),
        ground.vector[0].clone(),
    )
    with pytest.raises(IndexError, match="classes that compete"):
        take(phase.source.features, y + 5, cut(40, 8, torch.Generator()), False)  # type: ignore[attr-defined]
    assert torch.equal(ground.vector[0], before)


@pytest.mark.parametrize("fault", ["width", "row", "batch"])
def test_rows_that_are_not_there_are_refused(fault):
    phase = phase_of(32, 6, 40, batch=8)
    ground, rule, y = begun(phase)
    take, index = (
        adapter_head_c.CompiledEpochs(adapter_head_c.library(), ground, rule, 8, 0.0, 5.0),
        cut(40, 8, torch.Generator()),
    )
    u = phase.source.features[:, :31] if fault == "width" else phase.source.features  # type: ignore[attr-defined]
    u = u[:39] if fault == "row" else u
    with pytest.raises(IndexError, match="no batches of 8 x 32"):
        take(u, y, index[:, :7] if fault == "batch" else index, False)


def test_features_of_another_type_are_taken_as_float32():
    phase = phase_of(32, 6, 40, batch=8)
    (one, rule, y), (two, *_) = begun(phase), begun(phase)
    u, index = phase.source.features, cut(40, 8, torch.Generator())  # type: ignore[attr-defined]
    for ground, given in ((one, u), (two, u.double())):
        adapter_head_c.CompiledEpochs(adapter_head_c.library(), ground, rule, 8, 0.0, 5.0)(given, y.int(), index, False)
    assert torch.equal(one.vector[0], two.vector[0])


def test_other_numbers_than_float32_go_the_written_way():
    phase = phase_of(32, 6, 40, batch=8)
    wide = {b: {k: v.double() for k, v in block.items()} for b, block in phase.weights.items()}
    ground, rule, _ = begun(Train(**{**vars(phase), "weights": wide}))
    assert not isinstance(adapter_head_epoch.epoch_function(ground, rule, phase), adapter_head_c.CompiledEpochs)
    assert isinstance(adapter_head_epoch.epoch_function(*begun(phase)[:2], phase), adapter_head_c.CompiledEpochs)


def test_here_it_is_trusted_and_where_it_takes_other_steps_it_is_not(monkeypatch):
    look, take = adapter_head_epoch.checked_library.__wrapped__, adapter_head_c.CompiledEpochs.__call__
    assert look() is adapter_head_c.library() is not None

    def wrong(self, *where):
        losses = take(self, *where)
        self.vectors[0][3] += 0.01
        return losses

    monkeypatch.setattr(adapter_head_c.CompiledEpochs, "__call__", wrong)
    assert look() is None
    monkeypatch.setattr(adapter_head_c.CompiledEpochs, "__call__", lambda self, *where: take(self, *where) + 0.01)
    assert look() is None
    monkeypatch.setattr(adapter_head_c, "library", lambda: None)
    assert look() is None
