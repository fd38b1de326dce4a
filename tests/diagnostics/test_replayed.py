"""The replay of a run against real examples: one extractor and the same real examples for all methods."""

from __future__ import annotations

import pytest
import torch

from profcil.diagnostics.replay_gap import median_bandwidth, replay_gap
from profcil.diagnostics.replayed import COUNT, AffineMap, EvaluationSpace, explained_variance, measure_replay
from profcil.engine.client import embed
from profcil.engine.warmup import warm
from profcil.methods.base import Samples


def space_of(run) -> EvaluationSpace:
    warmed = warm(run.world, lambda *a: None).weights
    return EvaluationSpace(run.world, run.method, run.state, warmed)


@pytest.fixture(scope="module")
def evaluation(tiny):
    return space_of(tiny("promax"))


def test_every_remembered_class_is_measured_and_task_gaps_are_means_over_classes(evaluation):
    report, arrays = measure_replay(evaluation)
    plan = evaluation.world.plan
    bank = evaluation.state.server.blocks["memory"]
    assert set(map(int, report["classes"])) == set(bank.labels)
    for t, task in enumerate(plan.tasks):
        gaps = [report["classes"][str(y)]["mmd2"] for y in task if y in bank.labels]
        assert report["tasks"][str(t)]["mmd2"] == pytest.approx(sum(gaps) / len(gaps))
    assert arrays["real"].shape == arrays["replay"].shape and len(arrays["real"]) == len(arrays["real_label"])
    assert set(arrays["replay_label"].tolist()) == set(bank.labels)
    assert 0.5 < report["fit"]["base"] <= 1.0


def test_inputs_are_embedded_by_the_warmed_base_and_real_examples_are_shared(evaluation, tiny, monkeypatch):
    """The method replays training images of the class; both sides are embedded by the same extractor."""
    train = evaluation.world.bundle.train

    def replay(net, state, clients, label, count, rng):
        rows = torch.nonzero(train.y == label).flatten()[:count]
        return Samples("inputs", train.inputs(rows))

    monkeypatch.setattr(evaluation.method, "replay", replay)
    pairs = {p.label: p for p in evaluation.pairs()}
    label = evaluation.world.plan.tasks[0][0]
    rows = evaluation.held_out(label)
    phi = embed(
        evaluation.world.net,
        evaluation.warm["base"],
        evaluation.world.evaluation_examples,
        torch.arange(len(evaluation.world.evaluation_examples)),
    )
    assert torch.equal(pairs[label].real, phi[rows]) and pairs[label].bandwidth == median_bandwidth(phi[rows])
    shown = torch.nonzero(train.y == label).flatten()[: len(rows)]
    assert torch.allclose(pairs[label].replay, embed(evaluation.world.net, evaluation.warm["base"], train, shown))
    other = space_of(tiny("pro"))
    assert torch.equal(other.held_out(label), rows) and torch.equal(other.judged, evaluation.judged)
    assert (
        len(rows) == min(COUNT, int((evaluation.world.evaluation_examples.y == label).sum())) == len(set(rows.tolist()))
    )


@pytest.mark.parametrize("space", ["base", "adapted"])
def test_true_features_have_no_gap_and_those_of_another_class_do(evaluation, monkeypatch, space):
    """Replay consists of real training features of the class, then of another class."""
    evaluation.maps.clear()
    train = evaluation.world.bundle.train
    shift = {"by": 0}

    def replay(net, state, clients, label, count, rng):
        rows = torch.nonzero(train.y == (label + shift["by"]) % 10).flatten()[:count]
        return Samples(space, (evaluation.final_features(space, train, rows),))

    monkeypatch.setattr(evaluation.method, "replay", replay)
    right = [replay_gap(p.real, p.replay, 0, p.bandwidth)["mmd2"] for p in evaluation.pairs()]
    shift["by"] = 1
    wrong = [replay_gap(p.real, p.replay, 0, p.bandwidth)["mmd2"] for p in evaluation.pairs()]
    assert abs(sum(right) / len(right)) < 0.05 < 0.3 < sum(wrong) / len(wrong)
    evaluation.maps.clear()


def test_both_sides_have_as_many_samples_as_were_replayed(evaluation, monkeypatch):
    def replay(net, state, clients, label, count, rng):
        return Samples("inputs", evaluation.world.bundle.train.inputs(torch.arange(3)))

    monkeypatch.setattr(evaluation.method, "replay", replay)
    assert all(len(p.real) == len(p.replay) == 3 for p in evaluation.pairs())


def test_a_method_that_replays_nothing_has_no_gap(tiny):
    assert measure_replay(space_of(tiny("fedavg"))) is None


def test_the_map_is_ridge_regression_and_recovers_an_affine_map():
    linear = pytest.importorskip("sklearn.linear_model")
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=rng) * torch.tensor([1, 2, 3, 4, 5, 6.0])
    y = x @ torch.randn(6, 3, generator=rng) + 5 + 0.1 * torch.randn(400, 3, generator=rng)
    to_phi = AffineMap(x, y)
    z = (x - x.mean(0)) / x.std(0)
    model = linear.Ridge(alpha=1e-3 * len(x)).fit(z.numpy(), y.numpy())
    assert torch.allclose(to_phi(x), torch.from_numpy(model.predict(z.numpy())).float(), atol=1e-3)
    assert explained_variance(to_phi(x), y) > 0.99


def test_explained_variance_is_one_for_the_truth_and_zero_for_the_mean():
    y = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
    assert explained_variance(y, y) == pytest.approx(1.0) and explained_variance(
        y.mean(0).expand(50, 4), y
    ) == pytest.approx(0.0)
