"""PRO-BAYES: it stores sums of fixed features by class and nothing else, and noise on them harms little."""

from __future__ import annotations

import pytest
import torch

from profcil.memory import bayes
from profcil.model.dictionary.hashed import HashedDictionary


def begun(fresh, **settings):
    return fresh("probayes", params__dictionary=200, **settings)


def test_log_rates_follow_the_formula():
    count = torch.tensor([2.0, 4.0])
    sums = torch.tensor([[2.0, 0.0], [0.0, 4.0]])
    weight = bayes.log_rates(count, sums, torch.zeros(2), 0.5)
    scaled = torch.tensor([[3.0, 0.0], [0.0, 3.0]], dtype=torch.float64)  # to three examples each
    pooled = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert torch.allclose(weight, ((scaled + 0.5) / (pooled + 0.5)).log())


def test_sums_of_chunks_are_sums():
    features = torch.rand(600, 3)
    y = torch.arange(600) % 2 * 5
    labels, count, sums = bayes.class_sums(features, y)
    assert labels == (0, 5) and count.tolist() == [300, 300]
    assert torch.allclose(sums[1], features[y == 5].double().sum(0))


def test_noise_does_not_prefer_the_class_that_has_more_of_it():
    """Classes with the same rates, half of them with four times the deviation: their logarithms are larger on average,
    and the comparison under the same noise takes that off."""
    rng = torch.Generator().manual_seed(0)
    variance = torch.tensor([1.0, 16.0]).repeat(20)
    noise = torch.randn(40, 2000, generator=rng, dtype=torch.float64) * variance.sqrt()[:, None]
    sums = 0.2 + noise
    weight = bayes.log_rates(torch.full((40,), 100.0), sums, variance, 0.1).mean(1)
    uncorrected = sums.clamp(min=0.0).add(0.1 + 2.5).log().mean(1)
    assert float(uncorrected[1::2].mean() - uncorrected[::2].mean()) > 0.2
    assert abs(float(weight[1::2].mean() - weight[::2].mean())) < 0.04


def test_the_sums_are_those_of_all_examples_whatever_the_order_of_tasks(fresh):
    run = begun(fresh, clients=3, participants=3).stream()
    block = run.server.blocks["class_sums"]
    world = run.world
    rows = torch.cat([torch.tensor(world.plan.owned(client)) for client in range(3)])
    features = run.method.compute_features(world.net, world.bundle.train.inputs(rows), run.server.blocks["dictionary"])
    labels, count, sums = bayes.class_sums(features, world.bundle.train.y[rows])
    assert labels == block.labels and torch.equal(count.double(), block.tensors["count"])
    assert torch.allclose(sums, block.tensors["sum"], atol=1e-3)


def test_a_client_reports_once_a_position_and_nothing_else_is_sent(fresh):
    run = begun(fresh, train__rounds=3)
    run.stream()
    uplink = [e for e in run.ledger.entries if e.direction == "up" and e.kind == "statistics" and e.stage == "refresh"]
    senders = [(e.position, e.client) for e in uplink]
    assert len(senders) == len(set(senders))
    assert not [e for e in run.ledger.entries if e.kind == "model" and e.stage != "warmup"]


def test_rows_have_unit_length_and_noise_is_of_that_size(fresh):
    run = begun(fresh, warmup__rounds=0, privacy__unit="example", privacy__epsilon=8.0, train__rounds=2)
    run.stream()
    block = run.server.blocks["class_sums"]
    multiplier = run.world.protection.multiplier
    reports = block.tensors["noise"] / (multiplier**2 * 1.1)  # the sums have 1 of 1.1 parts of the budget
    assert torch.allclose(reports, reports.round(), atol=1e-3) and bool((reports > 0.9).all())
    entries = run.server.blocks["dictionary"]
    features = run.method.compute_features(run.world.net, run.world.bundle.train.inputs(torch.arange(9)), entries)
    assert torch.allclose(features.norm(dim=1), torch.ones(9))


@pytest.mark.parametrize("width", [7, 64])
def test_hashed_entries_need_no_data_and_count_an_ngram_once(width):
    dictionary = HashedDictionary(width, vocabulary=50)
    entries = dictionary.begin(torch.Generator())
    tokens = torch.tensor([[2, 3, 2, 3, 0, 0], [2, 3, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    features = dictionary.features(entries, (tokens,))
    assert dictionary.rounds == 0 and features.shape == (3, width)
    assert torch.equal(features[0], features[1])  # the same words and pairs
    assert torch.allclose(features.norm(dim=1), torch.tensor([1.0, 1.0, 0.0]))
