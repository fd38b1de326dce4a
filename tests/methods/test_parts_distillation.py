"""Distillation: over sets of classes, towards fixed targets, on epochs of real and generated examples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.methods.parts.distillation import (
    MixedSource,
    augment_real,
    masked_mean,
    old_head_distance,
    soft_cross_entropy,
)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mask(classes: int, *ids: int) -> torch.Tensor:
    return torch.isin(torch.arange(classes), torch.tensor(ids))


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(0, 6), min_size=1), st.floats(0.5, 4.0), st.integers(0, 99))
def test_soft_cross_entropy_uses_only_the_classes_of_the_mask(ids, temperature, seed):
    s, t = torch.randn(2, 5, 7, generator=rng(seed))
    index = sorted(ids)
    among = mask(7, *ids)
    wanted = -((t[:, index] / temperature).softmax(1) * (s[:, index] / temperature).log_softmax(1)).sum(1)
    s.requires_grad_()
    found = soft_cross_entropy(s, t, among, temperature)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    assert bool(torch.isfinite(s.grad).all())
    assert not s.grad[:, ~among].any()


def test_soft_cross_entropy_has_its_minimum_at_the_target():
    t = torch.randn(4, 6, generator=rng())
    s = t.clone().requires_grad_()
    soft_cross_entropy(s, t, mask(6, 1, 4, 5), 2.0).sum().backward()
    assert float(s.grad.abs().max()) < 1e-6


def test_the_old_head_distance_ignores_directions_that_do_not_affect_the_head():
    head = torch.randn(5, 3, generator=rng())
    head[:, 2] = 0  # the head ignores the third feature
    z = torch.randn(4, 3, generator=rng(1))
    moved = torch.tensor([0.0, 0.0, 9.0])
    old = mask(5, 0, 3)
    assert not old_head_distance((z + moved) @ head.T, z @ head.T, old).any()
    scores = z @ head.T
    wanted = ((scores[:, [0, 3]] - 1) ** 2).sum(1) / 2
    torch.testing.assert_close(old_head_distance(scores, torch.ones_like(scores), old), wanted)


def test_a_masked_mean_over_no_rows_is_zero():
    each = torch.tensor([1.0, 2.0, 6.0])
    assert float(masked_mean(each, torch.tensor([True, False, True]))) == 3.5
    assert float(masked_mean(each, torch.zeros(3, dtype=torch.bool))) == 0.0


def test_real_images_are_augmented_and_generated_ones_are_not():
    class Shifted:
        def weak(self, inputs, rng):
            return (inputs[0].roll(1, 3),)

    x = torch.arange(32).view(4, 1, 2, 4).to(torch.uint8)
    real = torch.tensor([True, False, True, False])
    seen = augment_real(Shifted(), {"x": x, "real": real, "rng": rng()})
    assert torch.equal(seen[real], x[real].roll(1, 3) / 255)
    assert torch.equal(seen[~real], x[~real] / 255)


def test_distillation_preserves_old_logits_better_than_plain_training():
    """A linear model learns classes 1 and 4; on inputs of old classes 0, 2 and 5 its old scores should not change."""
    x, old_x = torch.randn(2, 60, 4, generator=rng())
    y = torch.tensor([1, 4]).repeat(30)
    old = mask(6, 0, 2, 5)
    new = mask(6, 1, 4)
    start = torch.randn(6, 4, generator=rng(1))
    target = old_x @ start.T

    def drift(weight: float) -> float:
        shared = torch.eye(4).requires_grad_()  # the features, which both losses change
        for _ in range(200):
            new_logits = x @ shared @ start.T
            old_logits = old_x @ shared @ start.T
            fit = torch.nn.functional.cross_entropy(new_logits[:, new], (y == 4).long())
            loss = fit + weight * soft_cross_entropy(old_logits, target, old, 2.0).mean()
            shared = (shared - 0.03 * torch.autograd.grad(loss, shared)[0]).detach().requires_grad_()
        kept = (old_x @ shared.detach() @ start.T)[:, old].softmax(1)
        return float((kept - target[:, old].softmax(1)).abs().mean())

    assert drift(25.0) < 0.5 * drift(0.0)


def test_an_epoch_has_each_real_example_once_and_the_quota_of_every_generated_class():
    real = {"x": torch.arange(3), "y": torch.tensor([7, 7, 1])}
    generated = {"x": torch.arange(10, 16), "y": torch.tensor([2, 5, 2, 2, 5, 2])}
    source = MixedSource(real, generated, 3)
    epoch = source.epoch(rng())
    assert source.size == 9 == len(epoch["x"]) and source.replayed == 6
    assert epoch["x"][:3].tolist() == [0, 1, 2] and epoch["real"].tolist() == [True] * 3 + [False] * 6
    assert sorted(epoch["y"][3:].tolist()) == [2, 2, 2, 5, 5, 5]
    assert all(generated["y"][x - 10] == y for x, y in zip(epoch["x"][3:], epoch["y"][3:], strict=True))
    assert len(set(epoch["x"][3:].tolist())) == 5  # one of the two images of class 5 is repeated
    assert any(not torch.equal(source.epoch(rng(s))["x"], epoch["x"]) for s in range(1, 5))


def test_without_generated_examples_an_epoch_has_the_real_ones_only():
    nothing = {"x": torch.zeros(0, dtype=torch.long), "y": torch.zeros(0, dtype=torch.long)}
    source = MixedSource({"x": torch.arange(3), "y": torch.tensor([7, 7, 1])}, nothing, 3)
    assert source.size == 3 and not source.replayed
    assert source.epoch(rng())["x"].tolist() == [0, 1, 2]
