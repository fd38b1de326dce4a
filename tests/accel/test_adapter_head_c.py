"""An epoch in C against the epoch in Python, for sizes that fill vectors and tiles, and for others."""

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
    _, state, rule, place = prepared(phase, Classification.order(phase.constants))
    return state, rule, place[phase.source.y]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("width", "classes", "batch"),
    [(384, 150, 64), (64, 7, 64), (65, 33, 20), (3, 2, 1), (17, 100, 16), (100, 9, 130), (48, 64, 63)],
)
def test_losses_and_weights_are_those_of_the_epoch_in_python(width, classes, batch):
    phase = phase_of(width, classes, 3 * batch + 1, batch=batch, weight_decay=0.01)
    index = cut(phase.source.size, batch, torch.Generator().manual_seed(1))
    written, rule, y = begun(phase)
    ours, *_ = begun(phase)
    start, *_ = begun(phase)
    u = phase.source.features  # type: ignore[attr-defined]
    expected = adapter_head_epoch.run_epoch(written, u, y, index, rule, 0.0, 5.0, True).squeeze(1)
    take = adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, batch, 0.0, 5.0)
    losses = take(u, y, index, True)
    assert torch.allclose(losses[0], expected[0], rtol=3e-6, atol=3e-6)  # then rounding is amplified
    assert torch.allclose(losses, expected, rtol=1e-4, atol=1e-5)
    moved = (written.vector[0] - start.vector[0]).norm()
    assert (ours.vector[0] - written.vector[0]).norm() < 2e-4 * moved
    assert len(take(u, y, index, False)) == 0 and torch.isfinite(ours.vector[0]).all()


def test_the_weights_of_a_tiny_feature_move_as_in_python():
    """Adam moves a weight with tiny gradients as far as any other, so their relative error has to be small."""
    phase = phase_of(32, 6, 40, batch=8)
    u = phase.source.features  # type: ignore[attr-defined]
    u[:, 3] *= 1e-6
    index = cut(40, 8, torch.Generator().manual_seed(1))
    for weights in ("up", "up_bias"):
        phase.weights["adapter"][weights].zero_()
    written, rule, y = begun(phase)
    ours, *_ = begun(phase)
    adapter_head_epoch.run_epoch(written, u, y, index[:1], rule, 0.0, 5.0, False)
    adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, 8, 0.0, 5.0)(u, y, index[:1], False)
    assert (ours.vector[0] - written.vector[0]).abs().max() < 1e-6 < rule.lr


def test_large_scores_neither_overflow_nor_lose_their_loss():
    phase = phase_of(32, 6, 40, batch=8)
    phase.weights["head"]["weight"].mul_(1e3)
    index = cut(40, 8, torch.Generator().manual_seed(1))
    written, rule, y = begun(phase)
    ours, *_ = begun(phase)
    u = phase.source.features  # type: ignore[attr-defined]
    expected = adapter_head_epoch.run_epoch(written, u, y, index, rule, 0.0, 5.0, True).squeeze(1)
    losses = adapter_head_c.CompiledEpochs(adapter_head_c.library(), ours, rule, 8, 0.0, 5.0)(u, y, index, True)
    assert expected.max() > 100 and torch.allclose(losses, expected, rtol=1e-3, atol=1e-2)


def test_nan_stays_nan():
    """The result of a phase must show it."""
    phase = phase_of(32, 6, 40, batch=8)
    state, rule, y = begun(phase)
    u = phase.source.features.clone()  # type: ignore[attr-defined]
    u[3, 5] = torch.nan
    losses = adapter_head_c.CompiledEpochs(adapter_head_c.library(), state, rule, 8, 0.0, 5.0)(
        u, y, cut(40, 8, torch.Generator()), True
    )
    assert losses.isnan().any() and state.vector[0].isnan().any()


def test_a_label_that_is_not_allowed_is_refused_and_no_weight_changes():
    phase = phase_of(32, 6, 40, batch=8)
    state, rule, y = begun(phase)
    take = adapter_head_c.CompiledEpochs(adapter_head_c.library(), state, rule, 8, 0.0, 5.0)
    before = state.vector[0].clone()
    with pytest.raises(IndexError, match="classes that compete"):
        take(phase.source.features, y + 5, cut(40, 8, torch.Generator()), False)  # type: ignore[attr-defined]
    assert torch.equal(state.vector[0], before)


@pytest.mark.parametrize("fault", ["width", "row", "batch"])
def test_rows_that_do_not_exist_are_refused(fault):
    phase = phase_of(32, 6, 40, batch=8)
    state, rule, y = begun(phase)
    take = adapter_head_c.CompiledEpochs(adapter_head_c.library(), state, rule, 8, 0.0, 5.0)
    index = cut(40, 8, torch.Generator())
    u = phase.source.features[:, :31] if fault == "width" else phase.source.features  # type: ignore[attr-defined]
    u = u[:39] if fault == "row" else u
    with pytest.raises(IndexError, match="no batches of 8 x 32"):
        take(u, y, index[:, :7] if fault == "batch" else index, False)


def test_features_of_another_type_are_taken_as_float32():
    phase = phase_of(32, 6, 40, batch=8)
    one, rule, y = begun(phase)
    two, *_ = begun(phase)
    u = phase.source.features  # type: ignore[attr-defined]
    index = cut(40, 8, torch.Generator())
    for state, given in ((one, u), (two, u.double())):
        adapter_head_c.CompiledEpochs(adapter_head_c.library(), state, rule, 8, 0.0, 5.0)(given, y.int(), index, False)
    assert torch.equal(one.vector[0], two.vector[0])


def test_other_types_than_float32_use_torchscript():
    phase = phase_of(32, 6, 40, batch=8)
    wide = {b: {k: v.double() for k, v in block.items()} for b, block in phase.weights.items()}
    state, rule, _ = begun(Train(**{**vars(phase), "weights": wide}))
    assert not isinstance(adapter_head_epoch.epoch_function(state, rule, phase), adapter_head_c.CompiledEpochs)
    assert isinstance(adapter_head_epoch.epoch_function(*begun(phase)[:2], phase), adapter_head_c.CompiledEpochs)


def test_the_self_check_passes_here_and_fails_where_the_steps_differ(monkeypatch):
    check = adapter_head_epoch.checked_library.__wrapped__
    take = adapter_head_c.CompiledEpochs.__call__
    assert check() is adapter_head_c.library() is not None

    def wrong(self, *where):
        losses = take(self, *where)
        self.vectors[0][3] += 0.01
        return losses

    monkeypatch.setattr(adapter_head_c.CompiledEpochs, "__call__", wrong)
    assert check() is None
    monkeypatch.setattr(adapter_head_c.CompiledEpochs, "__call__", lambda self, *where: take(self, *where) + 0.01)
    assert check() is None
    monkeypatch.setattr(adapter_head_c, "library", lambda: None)
    assert check() is None
