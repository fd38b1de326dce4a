"""The replay of a run beside real examples: one extractor, the same real examples for all, no gap where none is."""

from __future__ import annotations

import pytest
import torch

from profcil.diagnostics.replay_gap import median_bandwidth, replay_gap
from profcil.diagnostics.replayed import COUNT, Eye, Map, examine, explained
from profcil.engine.client import embed
from profcil.engine.warmup import warm
from profcil.methods.base import Samples


def eye_of(run) -> Eye:
    return Eye(run.world, run.method, run.state, warm(run.world, lambda *a: None).weights)


def everything(run) -> torch.Tensor:
    return torch.arange(len(run.world.judged))


@pytest.fixture(scope="module")
def eye(tiny):
    return eye_of(tiny("promax"))


def test_every_remembered_class_is_examined_and_tasks_are_means_over_theirs(eye):
    report, arrays = examine(eye)
    plan, bank = eye.world.plan, eye.state.server.blocks["memory"]
    assert set(map(int, report["classes"])) == set(bank.labels)
    for t, task in enumerate(plan.tasks):
        gaps = [report["classes"][str(y)]["mmd2"] for y in task if y in bank.labels]
        assert report["tasks"][str(t)]["mmd2"] == pytest.approx(sum(gaps) / len(gaps))
    assert arrays["real"].shape == arrays["replay"].shape and len(arrays["real"]) == len(arrays["real_label"])
    assert set(arrays["replay_label"].tolist()) == set(bank.labels)
    assert 0.5 < report["fit"]["base"] <= 1.0


def test_inputs_are_embedded_by_the_warmed_base_and_the_real_side_is_shared(eye, tiny, monkeypatch):
    """A method that replays training images of the class: both sides go through the same extractor."""
    train = eye.world.bundle.train

    def replay(net, state, clients, label, count, rng):
        rows = torch.nonzero(train.y == label).flatten()[:count]
        return Samples("inputs", train.inputs(rows))

    monkeypatch.setattr(eye.method, "replay", replay)
    pairs = {p.label: p for p in eye.pairs()}
    label = eye.world.plan.tasks[0][0]
    rows = eye.held_out(label)
    phi = embed(eye.world.net, eye.warm["base"], eye.world.judged, torch.arange(len(eye.world.judged)))
    assert torch.equal(pairs[label].real, phi[rows]) and pairs[label].bandwidth == median_bandwidth(phi[rows])
    shown = torch.nonzero(train.y == label).flatten()[: len(rows)]
    assert torch.allclose(pairs[label].replay, embed(eye.world.net, eye.warm["base"], train, shown))
    other = eye_of(tiny("pro"))
    assert torch.equal(other.held_out(label), rows) and torch.equal(other.judged, eye.judged)
    assert len(rows) == min(COUNT, int((eye.world.judged.y == label).sum())) == len(set(rows.tolist()))


@pytest.mark.parametrize("space", ["base", "adapted"])
def test_true_features_have_no_gap_and_wrong_ones_do(eye, monkeypatch, space):
    """Real training features of the class as replay, then those of another class."""
    eye.maps.clear()
    train, shift = eye.world.bundle.train, {"by": 0}

    def replay(net, state, clients, label, count, rng):
        rows = torch.nonzero(train.y == (label + shift["by"]) % 10).flatten()[:count]
        return Samples(space, (eye.own(space, train, rows),))

    monkeypatch.setattr(eye.method, "replay", replay)
    right = [replay_gap(p.real, p.replay, 0, p.bandwidth)["mmd2"] for p in eye.pairs()]
    shift["by"] = 1
    wrong = [replay_gap(p.real, p.replay, 0, p.bandwidth)["mmd2"] for p in eye.pairs()]
    assert abs(sum(right) / len(right)) < 0.05 < 0.3 < sum(wrong) / len(wrong)
    eye.maps.clear()


def test_fewer_replayed_samples_meet_as_many_real_ones(eye, monkeypatch):
    def replay(net, state, clients, label, count, rng):
        return Samples("inputs", eye.world.bundle.train.inputs(torch.arange(3)))

    monkeypatch.setattr(eye.method, "replay", replay)
    assert all(len(p.real) == len(p.replay) == 3 for p in eye.pairs())


def test_a_method_that_replays_nothing_has_no_gap(tiny):
    assert examine(eye_of(tiny("fedavg"))) is None


def test_the_map_is_ridge_regression_and_finds_an_affine_truth():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=rng) * torch.tensor([1, 2, 3, 4, 5, 6.0])
    y = x @ torch.randn(6, 3, generator=rng) + 5 + 0.1 * torch.randn(400, 3, generator=rng)
    carry = Map(x, y)
    z = (x - x.mean(0)) / x.std(0)
    model = linear.Ridge(alpha=1e-3 * len(x)).fit(z.numpy(), y.numpy())
    assert torch.allclose(carry(x), torch.from_numpy(model.predict(z.numpy())).float(), atol=1e-3)
    assert explained(carry(x), y) > 0.99


def test_explained_variance_is_one_for_the_truth_and_zero_for_the_mean():
    y = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    assert explained(y, y) == pytest.approx(1.0) and explained(y.mean(0).expand(50, 4), y) == pytest.approx(0.0)
