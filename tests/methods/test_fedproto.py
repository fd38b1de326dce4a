"""FedProto: features are pulled towards prototypes, and the bank of prototypes forgets no class."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.encoders.model import MODEL, Tail, cross_entropy
from profcil.engine.payload import Block
from profcil.methods.parts.prototypes import merge, no_prototypes, report, table


def bank(server) -> dict[int, torch.Tensor]:
    block = server.blocks["prototypes"]
    return dict(zip(block.labels, block.tensors["mean"], strict=True))


def adapted(client, weights) -> torch.Tensor:
    return Tail(weights["adapter"], {}).adapt(client.features(weights["base"]))


# -- the shared ingredient --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([3, 7, 8]), min_size=2, max_size=12), st.integers(1, 11), st.integers(0, 99))
def test_pooled_reports_are_the_means_of_all_data(labels, cut, seed):
    y = torch.tensor(labels)
    z = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(seed))
    cut = min(cut, len(y) - 1)
    merged = merge(no_prototypes(z[0]), [report(z[:cut], y[:cut]), report(z[cut:], y[cut:])])
    assert merged.labels == tuple(sorted(set(labels)))
    for label, mean in zip(merged.labels, merged.tensors["mean"], strict=True):
        torch.testing.assert_close(mean, z[y == label].mean(0))


def test_only_reported_classes_move_and_by_their_share():
    old = Block("prototype", {"mean": torch.tensor([[1.0], [2.0]])}, (4, 9))
    fresh = Block("prototype", {"mean": torch.tensor([[5.0], [6.0]]), "count": torch.tensor([1, 1])}, (2, 9))
    merged = merge(old, [fresh], 0.25)
    assert merged.labels == (2, 4, 9)
    assert merged.tensors["mean"].flatten().tolist() == [5.0, 1.0, 3.0]
    assert merge(old, [fresh]).tensors["mean"].flatten().tolist() == [5.0, 1.0, 6.0]


def test_a_table_has_a_row_for_every_class_id_and_knows_which_are_known():
    rows, known = table(Block("prototype", {"mean": torch.tensor([[1.0], [2.0]])}, (1, 4)), 6)
    assert rows.flatten().tolist() == [0, 1, 0, 0, 2, 0]
    assert known.nonzero().flatten().tolist() == [1, 4]
    assert not table(no_prototypes(torch.zeros(3)), 6)[1].any()


# -- the method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pull", "same"), [(0.0, True), (0.1, False)])
def test_without_a_pull_the_model_is_fedavgs_to_the_bit(tiny, pull, same):
    plain, ours = tiny("fedavg").server.weights(), tiny("fedproto", pull=pull).server.weights()
    assert all(torch.equal(t, plain[b][k]) for b in MODEL for k, t in ours[b].items()) == same


def test_a_pull_brings_features_nearer_to_the_prototypes(fresh):
    def distance(pull: float) -> float:
        run = fresh("fedproto", pull=pull, train__epochs=3)
        known = bank(run.play(0, 0))
        total = 0.0
        for reply in run.turns(0, 1):
            client = run.client(reply.client, 0, 1)
            z, wanted = adapted(client, reply.weights()), [known.get(int(y)) for y in client.y]
            total += sum(float((a - b).square().mean()) for a, b in zip(z, wanted, strict=True) if b is not None)
        return total

    assert 0 < distance(10.0) < 0.5 * distance(0.0)


def test_a_label_without_a_prototype_adds_nothing(fresh):
    run = fresh("fedproto", pull=3.0, setting="homogeneous")
    net, client = run.world.net, run.client(run.clients(0, 0)[0], 0, 0)
    assert len(client.labels) == 2
    net.load(run.server.weights())
    net.eval()
    net.augment = False
    target, known = torch.ones(net.classes, net.features), torch.zeros(net.classes, dtype=torch.bool)
    known[client.labels[0]] = True
    allowed = torch.ones(net.classes, dtype=torch.bool)
    inputs = client.examples.inputs(client.current)
    batch = {"inputs": inputs, "y": client.y, "rng": None, "allowed": allowed, "target": target, "known": known}
    with torch.no_grad():
        u = net.base(*inputs)
        gap = (net.tail.adapt(u) - 1).square().mean(1)[client.y == client.labels[0]].sum() / len(u)
        expected = cross_entropy(net.classify(u), client.y, allowed) + 3.0 * gap
        torch.testing.assert_close(run.method.fit_loss(net, batch), expected)


def test_prototypes_are_those_of_the_trained_local_model(fresh):
    run = fresh("fedproto")
    for reply in run.turns(0, 0):
        client, sent = run.client(reply.client, 0, 0), reply.blocks["prototypes"]
        z = adapted(client, reply.weights())
        assert sent.labels == client.labels
        for label, mean, count in zip(sent.labels, sent.tensors["mean"], sent.tensors["count"], strict=True):
            torch.testing.assert_close(mean, z[client.y == label].mean(0))
            assert int(count) == int((client.y == label).sum())


def test_a_class_that_nobody_reports_keeps_its_prototype(tiny):
    run = tiny("fedproto")
    before, away = run.before(), 0
    for what, when, server in run.trail:
        if what != "round":
            continue
        plan, old, new = run.world.plan, bank(before[when.position, when.round]), bank(server)
        told = {y for c in run.clients(when.position, when.round) for y in plan.observed(c, when.position)}
        assert new.keys() == old.keys() | told
        assert all(torch.equal(new[y], old[y]) for y in old.keys() - told)
        assert all(not torch.equal(new[y], old[y]) for y in old.keys() & told)
        away += len(old.keys() - told)
    assert away > 0


def test_the_ledger_shows_a_mean_and_a_count_for_each_reported_class(tiny):
    run = tiny("fedproto")
    plan, d, rounds = run.world.plan, run.world.net.features, run.world.config.train.rounds
    places = [(p, r, c) for p in range(plan.positions) for r in range(rounds) for c in run.clients(p, r)]
    told = sum(len(plan.observed(c, p)) for p, _, c in places)
    assert run.ledger.total(kind="prototype", direction="up") == told * (4 * d + 4)


def test_the_nearest_prototype_may_decide(fresh):
    run = fresh("fedproto", predict="prototype")
    net = run.world.net
    net.load(run.server.weights())
    u = torch.randn(3, net.features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        planted = Block("prototype", {"mean": net.tail.adapt(u)}, (2, 5, 9))
        scores = run.method.scores(net, run.server.put(prototypes=planted), u)
    assert scores.argmax(1).tolist() == [2, 5, 9]
    assert scores.isfinite().any(0).nonzero().flatten().tolist() == [2, 5, 9]
