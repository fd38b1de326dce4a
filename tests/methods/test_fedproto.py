"""FedProto: features are pulled towards prototypes, and the bank keeps the prototypes of absent classes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.engine.channel import Block
from profcil.methods.parts.prototypes import centres, class_means, merge, no_prototypes, report, tables
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, Tail


def bank(server) -> dict[int, torch.Tensor]:
    block = server.blocks["prototypes"]
    return dict(zip(block.labels, block.tensors["mean"], strict=True))


def adapted(client, weights) -> torch.Tensor:
    return Tail(weights["adapter"], {}).adapt(client.features(weights["base"]))


# -- the shared ingredient --------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([3, 7, 8]), min_size=2, max_size=12), st.integers(1, 11), st.integers(0, 99))
def test_merged_reports_are_the_means_of_all_data(labels, cut, seed):
    y = torch.tensor(labels)
    z = torch.randn(len(y), 4, generator=torch.Generator().manual_seed(seed))
    cut = min(cut, len(y) - 1)
    merged = merge(no_prototypes(z[0]), [report(z[:cut], labels[:cut]), report(z[cut:], labels[cut:])])
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


def test_a_table_has_a_row_for_every_class_id_and_a_mask_of_known_classes():
    rows, known = tables(Block("prototype", {"mean": torch.tensor([[1.0], [2.0]])}, (1, 4)), 6, 1)
    assert rows.flatten().tolist() == [0, 1, 0, 0, 2, 0]
    assert known.nonzero().flatten().tolist() == [1, 4]
    assert not tables(no_prototypes(torch.zeros(3)), 6, 1)[1].any()


def corners(shift: float = 0.0, spread: float = 0.01) -> torch.Tensor:
    """Twelve points around the four corners of a square, in a shuffled order."""
    rng = torch.Generator().manual_seed(1)
    square = torch.tensor([[0.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 4.0]]).repeat(3, 1)
    return (square + shift + spread * torch.randn(12, 2, generator=rng))[torch.randperm(12, generator=rng)]


def near(rows: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether both have the same points up to noise, in any order."""
    distance = torch.cdist(rows.float(), wanted.float())
    return rows.shape == wanted.shape and float(torch.cat([distance.amin(0), distance.amin(1)]).max()) < 0.1


SQUARE = torch.tensor([[0.0, 0.0], [0.0, 4.0], [4.0, 0.0], [4.0, 4.0]])


def test_several_prototypes_find_the_groups_and_one_is_the_mean():
    points = corners()
    found, mass = centres(points, torch.ones(12), 4)
    assert near(found, SQUARE) and mass.tolist() == [3.0] * 4
    torch.testing.assert_close(centres(points, torch.ones(12), 1)[0][0], points.double().mean(0))
    weight = torch.arange(12.0)
    torch.testing.assert_close(centres(points, weight, 1)[0][0], (weight @ points / weight.sum()).double())


def test_there_are_never_more_prototypes_than_different_points():
    twice = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 3.0]])
    found, mass = centres(twice, torch.ones(3), 5)
    assert near(found, torch.tensor([[1.0, 2.0], [3.0, 3.0]])) and sorted(mass.tolist()) == [1.0, 2.0]
    sent = report(twice, [8, 8, 3], 5)
    assert sent.labels == (3, 8) and sent.tensors["count"].tolist() == [1, 2]


def test_several_prototypes_are_tracked_through_a_common_drift():
    """The drift is larger than the square: if it were not subtracted, one corner would be nearest to all points."""
    y = [6] * 12
    bank = merge(no_prototypes(torch.zeros(2)), [report(corners(), y, 4)], count=4)
    assert bank.labels == (6,) * 4 and near(bank.tensors["mean"], SQUARE)
    there = merge(bank, [report(corners(50.0), y, 4)], count=4)
    assert near(there.tensors["mean"], SQUARE + 50)
    half = merge(bank, [report(corners(50.0), y, 4)], 0.5, 4)
    assert near(half.tensors["mean"], SQUARE + 25)


def test_a_class_with_few_examples_at_first_gets_its_prototypes_later():
    bank = merge(no_prototypes(torch.zeros(2)), [report(corners()[:1], [6], 4)], 0.1, 4)
    assert bank.labels == (6,)
    bank = merge(bank, [report(corners(), [6] * 12, 4)], 0.1, 4)
    assert bank.labels == (6,) * 4 and near(bank.tensors["mean"], SQUARE)


def test_tables_repeat_prototypes_and_class_means_average_them():
    bank = Block("prototype", {"mean": torch.tensor([[1.0], [2.0], [9.0]])}, (1, 1, 4))
    rows, known = tables(bank, 6, 3)
    assert rows[[1, 4], :, 0].tolist() == [[1, 2, 1], [9, 9, 9]]
    assert known.nonzero().flatten().tolist() == [1, 4]
    means = class_means(bank)
    assert means.labels == (1, 4) and means.tensors["mean"].flatten().tolist() == [1.5, 9.0]


# -- the method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pull", "same"), [(0.0, True), (0.1, False)])
def test_without_a_pull_the_model_equals_fedavg_to_the_bit(tiny, pull, same):
    plain = tiny("fedavg", accelerate="off").server.weights()
    ours = tiny("fedproto", accelerate="off", pull=pull).server.weights()
    assert all(torch.equal(t, plain[b][k]) for b in MODEL for k, t in ours[b].items()) == same


def test_the_pull_moves_features_towards_the_prototypes(fresh):
    def distance(pull: float) -> float:
        run = fresh("fedproto", pull=pull, train__epochs=3)
        known = bank(run.play(0, 0))
        total = 0.0
        for reply in run.turns(0, 1):
            client = run.client(reply.client, 0, 1)
            z = adapted(client, reply.weights())
            targets = [known.get(int(y)) for y in client.y]
            total += sum(float((a - b).square().mean()) for a, b in zip(z, targets, strict=True) if b is not None)
        return total

    assert 0 < distance(10.0) < 0.5 * distance(0.0)


def test_a_label_without_a_prototype_adds_zero_to_the_loss(fresh):
    run = fresh("fedproto", pull=3.0, setting="homogeneous")
    net = run.world.net
    client = run.client(run.clients(0, 0)[0], 0, 0)
    assert len(client.labels) == 2
    net.load(run.server.weights())
    net.eval()
    net.augment = False
    target = torch.ones(net.classes, 1, net.features)
    known = torch.zeros(net.classes, dtype=torch.bool)
    known[client.labels[0]] = True
    allowed = torch.ones(net.classes, dtype=torch.bool)
    inputs = client.examples.inputs(client.current)
    batch = {"inputs": inputs, "y": client.y, "rng": None, "allowed": allowed, "target": target, "known": known}
    with torch.no_grad():
        u = net.base(*inputs)
        gap = (net.tail.adapt(u) - 1).square().mean(1)[client.y == client.labels[0]].sum() / len(u)
        expected = cross_entropy(net.classify(u), client.y, allowed) + 3.0 * gap
        torch.testing.assert_close(run.method.fit_loss(net, batch), expected)


def test_prototypes_are_measured_under_the_trained_local_model(fresh):
    run = fresh("fedproto")
    for reply in run.turns(0, 0):
        client = run.client(reply.client, 0, 0)
        sent = reply.blocks["prototypes"]
        z = adapted(client, reply.weights())
        assert sent.labels == client.labels
        for label, mean, count in zip(sent.labels, sent.tensors["mean"], sent.tensors["count"], strict=True):
            torch.testing.assert_close(mean, z[client.y == label].mean(0))
            assert int(count) == int((client.y == label).sum())


def test_a_class_without_reports_keeps_its_prototype(tiny):
    run = tiny("fedproto")
    plan = run.world.plan
    before = run.before()
    absent = 0
    for what, when, server in run.trail:
        if what != "round":
            continue
        old = bank(before[when.position, when.round])
        new = bank(server)
        reported = {y for c in run.clients(when.position, when.round) for y in plan.observed(c, when.position)}
        assert new.keys() == old.keys() | reported
        assert all(torch.equal(new[y], old[y]) for y in old.keys() - reported)
        assert all(not torch.equal(new[y], old[y]) for y in old.keys() & reported)
        absent += len(old.keys() - reported)
    assert absent > 0


def test_the_ledger_shows_a_mean_and_a_count_for_each_reported_class(tiny):
    run = tiny("fedproto")
    plan = run.world.plan
    d = run.world.net.features
    rounds = run.world.config.train.rounds
    turns = [(p, c) for p in range(plan.positions) for r in range(rounds) for c in run.clients(p, r)]
    reported = sum(len(plan.observed(c, p)) for p, c in turns)
    assert run.ledger.total(kind="prototype", direction="up") == reported * (4 * d + 4)


def test_the_nearest_prototype_predicts_if_chosen(fresh):
    run = fresh("fedproto", predict="prototype")
    net = run.world.net
    net.load(run.server.weights())
    u = torch.randn(3, net.features, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        planted = Block("prototype", {"mean": net.tail.adapt(u)}, (2, 5, 9))
        scores = run.method.scores(net, run.server.put(prototypes=planted), u)
    assert scores.argmax(1).tolist() == [2, 5, 9]
    assert scores.isfinite().any(0).nonzero().flatten().tolist() == [2, 5, 9]


def test_the_expanded_regime_stores_and_sends_several_prototypes(tiny):
    one = tiny("fedproto", setting="homogeneous")
    many = tiny("fedproto", setting="homogeneous", regime="expanded")
    assert many.method.params.prototypes == 5
    for run, each in ((one, 1), (many, 5)):
        block = run.server.blocks["prototypes"]
        assert {block.labels.count(y) for y in block.labels} == {each}
        assert len(set(block.labels)) == 10
    sent = [run.ledger.total(kind="prototype", direction="up") for run in (one, many)]
    assert sent[1] == 5 * sent[0]


def test_a_feature_is_pulled_to_the_nearest_prototype_of_its_class(fresh):
    run = fresh("fedproto", pull=1.0, prototypes=2, setting="homogeneous")
    net = run.world.net
    client = run.client(run.clients(0, 0)[0], 0, 0)
    net.load(run.server.weights())
    net.eval()
    net.augment = False
    inputs = client.examples.inputs(client.current)
    allowed = torch.ones(net.classes, dtype=torch.bool)
    with torch.no_grad():
        z = net.tail.adapt(net.base(*inputs))
        far = torch.full_like(z[0], 100.0)
        near = z.mean(0)
        known = torch.ones(net.classes, dtype=torch.bool)
        target = torch.stack([far, near]).expand(net.classes, 2, -1)
        batch = {"inputs": inputs, "y": client.y, "rng": None, "allowed": allowed, "target": target, "known": known}
        gap = run.method.fit_loss(net, batch) - cross_entropy(net.tail.score(z), client.y, allowed)
        torch.testing.assert_close(gap, (z - near).square().mean())


def test_prototypes_are_the_replayed_samples(tiny):
    run = tiny("fedproto", setting="homogeneous", regime="expanded")
    samples = run.method.replay(run.world.net, run.server, [], 3, 4, torch.Generator())
    block = run.server.blocks["prototypes"]
    first = block.labels.index(3)
    assert samples.space == "adapted" and torch.equal(samples.tensors[0], block.tensors["mean"][first : first + 4])
    start = run.method.begin(run.server.weights())
    assert run.method.replay(run.world.net, start, [], 3, 4, torch.Generator()) is None
