"""Class-balanced rehearsal: the same number of features per class, real for current classes, pseudo for others."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from profcil.memory.bank import Bank, bank_from_moments, measure
from profcil.memory.rehearsal import Balanced, Rehearsal, pseudo_features

few = settings(max_examples=40, deadline=None)
labels = st.lists(st.sampled_from([3, 8, 11]), min_size=1, max_size=30)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bank_of(ids: tuple[int, ...], d: int = 2) -> Bank:
    """A bank whose means are far from all real features, so that a test can tell pseudo-features from real ones."""
    mean = 1000 + torch.arange(len(ids) * d, dtype=torch.float32).view(len(ids), d)
    return Bank(ids, mean, torch.ones(len(ids), d), torch.ones(len(ids), dtype=torch.int32))


def rehearsal(features: Tensor, y: Tensor, bank: Bank | None, *, quota: int, noise: float) -> Rehearsal:
    return Rehearsal(features, y, bank, quota=quota, noise=noise)


@few
@given(y=labels, quota=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_every_class_gets_exactly_its_quota_of_its_own_rows(y, quota, seed):
    y = torch.tensor(y)
    rows = Balanced(y, quota).draw(rng(seed))
    assert torch.equal(y[rows], y.unique().repeat_interleave(quota))


@few
@given(y=labels, quota=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_no_row_repeats_before_all_rows_of_its_class_were_drawn(y, quota, seed):
    y = torch.tensor(y)
    rows = Balanced(y, quota).draw(rng(seed))
    for label in y.unique():
        drawn = rows[y[rows] == label].bincount(minlength=len(y))[y == label]
        assert int(drawn.max() - drawn.min()) <= 1
        assert quota < len(drawn) or int(drawn.min()) >= 1


def test_different_epochs_draw_different_rows():
    y = torch.zeros(50, dtype=torch.long)
    source = rng()
    assert not torch.equal(Balanced(y, 5).draw(source), Balanced(y, 5).draw(source))


def test_pseudo_features_have_the_remembered_mean_and_spread():
    mean = torch.tensor([[1.0, -2.0], [5.0, 0.0]])
    spread = torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    drawn = pseudo_features(mean, spread, 20_000, 0.5, rng()).view(2, 20_000, 2)
    torch.testing.assert_close(drawn.mean(1), mean, rtol=0, atol=0.05)
    torch.testing.assert_close(drawn.std(1), 0.5 * spread, rtol=0.03, atol=0)


def test_an_epoch_first_draws_rows_and_then_normal_numbers():
    features = torch.rand(9, 4, generator=rng(1))
    y = torch.arange(9) % 3
    bank = bank_of((5, 7), 4)
    epoch = rehearsal(features, y, bank, quota=6, noise=0.3).epoch(rng())
    again = rng()
    real = features[Balanced(y, 6).draw(again)]
    old = bank.mean[:, None] + 0.3 * bank.spread[:, None] * torch.randn(2, 6, 4, generator=again)
    torch.testing.assert_close(epoch["u"], torch.cat([real, old.flatten(0, 1)]))


def test_with_a_factor_pseudo_features_have_the_covariance_that_all_classes_share():
    mean = torch.tensor([[1.0, -2.0], [5.0, 0.0]])
    factor = torch.tensor([[2.0, 0.0], [-1.5, 0.5]])
    spread = torch.full((2, 2), 100.0)  # not used
    drawn = pseudo_features(mean, spread, 20_000, 0.5, rng(), factor).view(2, 20_000, 2)
    torch.testing.assert_close(drawn.mean(1), mean, rtol=0, atol=0.05)
    for features in drawn:
        torch.testing.assert_close(features.T.cov(), 0.25 * factor @ factor.T, rtol=0, atol=0.03)


def test_an_epoch_uses_the_factor_and_without_it_coordinates_are_independent():
    bank = bank_of((5,))
    factor = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    for given_factor, expected in ((factor, 0.8), (None, 0.0)):
        source = Rehearsal(torch.zeros(1, 2), [7], bank, quota=20_000, noise=1.0, factor=given_factor)
        epoch = source.epoch(rng())
        cov = epoch["u"][epoch["y"] == 5].T.cov()
        torch.testing.assert_close(cov, torch.tensor([[1.0, expected], [expected, 1.0]]), rtol=0, atol=0.03)


def test_a_radius_is_the_spread_of_all_coordinates():
    drawn = pseudo_features(torch.zeros(1, 3), torch.full((1, 1), 2.0), 20_000, 1.0, rng())
    torch.testing.assert_close(drawn.std(0), torch.full((3,), 2.0), rtol=0.03, atol=0)


def test_without_noise_pseudo_features_are_the_mean():
    mean = torch.tensor([[1.0, -2.0], [5.0, 0.25]])
    assert torch.equal(pseudo_features(mean, torch.ones(2, 2), 3, 0.0, rng()), mean.repeat_interleave(3, 0))


@few
@given(y=labels, quota=st.integers(1, 8), seed=st.integers(0, 10**6))
def test_an_epoch_is_balanced_with_real_current_and_remembered_old_classes(y, quota, seed):
    y = torch.tensor(y)
    features = torch.arange(2.0 * len(y)).view(-1, 2)
    source = rehearsal(features, y, bank_of((3, 5, 11, 20)), quota=quota, noise=0.1)
    epoch = source.epoch(rng(seed))
    wanted = sorted({*y.tolist(), 3, 5, 11, 20})
    assert len(epoch["y"]) == len(epoch["u"]) == source.size == quota * len(wanted)
    assert epoch["y"].unique(return_counts=True)[0].tolist() == wanted
    assert epoch["y"].unique(return_counts=True)[1].tolist() == [quota] * len(wanted)
    given_rows = {(int(label), *f.tolist()) for label, f in zip(y, features, strict=True)}
    for label, u in zip(epoch["y"].tolist(), epoch["u"], strict=True):
        real = label in y  # a class with real data is never rehearsed from memory
        assert ((label, *u.tolist()) in given_rows) == real
        assert (float(u.min()) > 900) != real


def test_pseudo_features_have_the_label_of_their_class():
    bank = bank_of((4, 9))
    epoch = rehearsal(torch.zeros(1, 2), torch.tensor([7]), bank, quota=3, noise=0.0).epoch(rng())
    for row, label in enumerate(bank.labels):
        assert torch.equal(epoch["u"][epoch["y"] == label], bank.mean[row].repeat(3, 1))


def test_without_memory_an_epoch_has_current_classes_only():
    for bank in (None, bank_of(())):
        source = rehearsal(torch.ones(3, 2), torch.tensor([7, 7, 1]), bank, quota=2, noise=0.1)
        assert source.epoch(rng())["y"].tolist() == [1, 1, 7, 7]
        assert source.size == 4


def test_the_same_seed_draws_the_same_epoch():
    features = torch.randn(9, 2, generator=rng(1))
    y = torch.tensor([1, 1, 1, 2, 2, 2, 2, 2, 2])
    source = rehearsal(features, y, bank_from_moments(measure(features, y + 5)), quota=4, noise=0.3)
    assert torch.equal(source.epoch(rng(5))["u"], source.epoch(rng(5))["u"])
