"""FedSpace: persistent prototypes, pseudo-features within their budget, slow aggregation, and classes met."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from profcil.memory.bank import measure
from profcil.methods.base import average
from profcil.methods.fedspace import contrastive, radius_of, sample_pseudo_features
from profcil.model.net import Tail


def bank(server) -> dict[int, torch.Tensor]:
    block = server.blocks["prototypes"]
    return dict(zip(block.labels, block.tensors["mean"], strict=True))


def second_position(fresh, **settings):
    """A run at the start of its second position."""
    run = fresh("fedspace", participants=4, **settings)
    for r in range(3):
        run.play(0, r)
    return run


def constants(run, position: int, round: int) -> list[tuple[object, dict[str, torch.Tensor]]]:
    """Every participant, and the constants of its loss."""
    found = []
    for c in run.clients(position, round):
        client = run.world.client(c, run.when(position, round), run.state.private.get(c))
        found.append((client, next(run.method.turn(client, dict(run.server.blocks))).constants))
    return found


# -- the server -------------------------------------------------------------------------------------------------------


def test_prototypes_of_absent_classes_persist(tiny):
    run = tiny("fedspace")
    before = run.before()
    absent = 0
    for what, when, server in run.trail:
        if what == "round":
            observed = [run.world.plan.observed(c, when.position) for c in run.clients(when.position, when.round)]
            old = bank(before[when.position, when.round])
            new = bank(server)
            reported = {y for classes in observed for y in classes}
            assert new.keys() == old.keys() | reported
            assert all(torch.equal(new[y], old[y]) for y in old.keys() - reported)
            absent += len(old.keys() - reported)
    assert absent > 0


def test_model_and_prototypes_move_slowly(fresh):
    run = second_position(fresh, inertia=0.75, rate=0.2, setting="homogeneous")
    old = run.server
    replies = run.turns(0, 2)
    mean_weights = average(replies)
    reports = [r.blocks["prototypes"] for r in replies]
    new = run.play(0, 2)
    for b, tensors in new.weights().items():
        for k, t in tensors.items():
            torch.testing.assert_close(t, 0.75 * old.weights()[b][k] + 0.25 * mean_weights[b][k])
    total = sum(r.tensors["count"] for r in reports)
    pooled = sum(r.tensors["mean"] * (r.tensors["count"] / total)[:, None] for r in reports)
    for label, mean in zip(reports[0].labels, pooled, strict=True):
        torch.testing.assert_close(bank(new)[label], 0.8 * bank(old)[label] + 0.2 * mean)


def test_the_radius_is_measured_in_a_clients_first_position_only(fresh):
    run = second_position(fresh, setting="homogeneous")
    assert float(run.server.blocks["radius"].tensors["radius"]) > 0
    assert all("radius" in r.blocks for r in run.turns(0, 2))
    assert not any("radius" in r.blocks for r in run.turns(1, 0))


def test_the_radius_is_the_root_of_the_mean_variance():
    z = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 0.1, 0.0]) + 9
    y = torch.arange(300) % 3 + 4
    variance = torch.stack([z[y == c].var(0, correction=0).mean() for c in (4, 5, 6)])
    radius, count = radius_of(measure(z, y, radius=True))
    torch.testing.assert_close(radius, variance.mean().sqrt(), rtol=1e-4, atol=0)
    assert int(count) == 300


def test_a_class_with_one_example_does_not_affect_the_radius():
    z = 3 * torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(40, dtype=torch.long)
    alone = torch.cat([y, torch.tensor([5, 7])])
    torch.testing.assert_close(
        radius_of(measure(torch.cat([z, z[:2]]), alone, radius=True)), radius_of(measure(z, y, radius=True))
    )
    assert [float(t) for t in radius_of(measure(z[:2], torch.tensor([5, 7]), radius=True))] == [0.0, 0.0]


def test_the_radius_is_the_mean_over_the_latest_reports_of_all_clients(fresh):
    run = fresh("fedspace", setting="homogeneous", clients=4, participants=2)
    latest = {}
    for r in range(3):
        latest |= {reply.client: (reply.blocks["radius"].tensors, reply.samples) for reply in run.turns(0, r)}
        run.play(0, r)
        assert all(int(report["count"]) == samples for report, samples in latest.values())
        total = sum(samples for _, samples in latest.values())
        mean = sum(float(report["radius"]) * samples / total for report, samples in latest.values())
        assert float(run.server.blocks["radius"].tensors["radius"]) == pytest.approx(mean, rel=1e-5)
    assert len(latest) > 2


def test_a_late_client_with_one_example_of_a_class_does_not_change_the_radius(fresh, assign_samples):
    def owner(labels, tasks):
        given = np.full(len(labels), -1)
        for label in range(10):
            rows = np.flatnonzero(labels == label)
            given[rows[:30]], given[rows[30:60]] = 0, 1
            given[rows[60:61]] = 2 if label in tasks[2] else -1
        return given

    assign_samples(owner)
    run = fresh("fedspace", clients=3, participants=3).stream()
    radii = [float(s.blocks["radius"].tensors["radius"]) for s in run.after_positions()]
    assert radii == [radii[0]] * len(radii) and radii[0] > 0.1
    assert set(run.world.plan.observed(2, 2)) == set(run.world.plan.tasks[2])


def test_without_its_terms_the_first_round_is_fedavgs_to_the_bit(fresh):
    bare = fresh("fedspace", params__temperature=1.0, inertia=0.0, label_space="seen")
    ours, plain = (run.play(0, 0).weights() for run in (bare, fresh("fedavg")))
    assert all(torch.equal(t, plain[b][k]) for b in plain for k, t in ours[b].items())


# -- the client -------------------------------------------------------------------------------------------------------


def test_a_client_remembers_the_classes_it_has_met(fresh):
    run, met = second_position(fresh), {}
    for p in range(run.world.plan.positions):
        for c in run.clients(p, 0):
            met.setdefault(c, set()).update(run.world.plan.observed(c, p))
        run.play(p, 0)
        for c in run.clients(p, 0):
            assert set(run.state.private[c]["met"].nonzero().flatten().tolist()) == met[c]
    assert any(len(m) > 2 for m in met.values())


@pytest.mark.parametrize("space", ["met", "seen"])
def test_the_loss_competes_over_the_chosen_classes(fresh, space):
    run = second_position(fresh, label_space=space)
    for client, found in constants(run, 1, 0):
        before = run.state.private.get(client.id, {}).get("met", torch.zeros(10, dtype=torch.bool))
        met = set(before.nonzero().flatten().tolist()) | set(client.labels)
        wanted = met if space == "met" else set(client.seen)
        assert set(found["allowed"].nonzero().flatten().tolist()) == wanted
        assert set(found["rehearsed"].nonzero().flatten().tolist()) == met | bank(run.server).keys()
        assert set(found["old"].nonzero().flatten().tolist()) == bank(run.server).keys() - set(client.labels)


def test_an_epoch_has_the_quota_of_every_class_with_a_prototype(fresh):
    run = second_position(fresh, quota=7, train__batch=16)
    for client, found in constants(run, 1, 0):
        steps = -(-len(client.current) // 16)
        classes = len(bank(run.server))
        assert 0 <= steps * len(found["place"]) - 7 * classes < steps
        _, of = sample_pseudo_features(found | {"rng": torch.Generator().manual_seed(0)})
        each = [int((of == y).sum()) for y in bank(run.server)]
        assert max(each) - min(each) <= 1


def test_pseudo_features_lie_around_their_prototypes(fresh):
    run = second_position(fresh, quota=200)
    _, found = constants(run, 1, 0)[0]
    pseudo, of = sample_pseudo_features(found | {"radius": torch.tensor(0.5), "rng": torch.Generator().manual_seed(0)})
    noise = pseudo - torch.stack([bank(run.server)[int(y)] for y in of])
    assert abs(float(noise.mean())) < 0.05
    assert 0.45 < float(noise.std()) < 0.55


def test_rehearsal_trains_the_heads_rows_of_absent_classes(fresh):
    """Rows of classes that the client has never met change only by pseudo-features."""
    for weight in (0.0, 1.0):
        run = second_position(fresh, rehearse=weight, contrast=0.0, weight_decay=0.0)
        start = run.server.weights()["head"]["weight"]
        old = set(bank(run.server))
        private = {c: set(own["met"].nonzero().flatten().tolist()) for c, own in run.state.private.items()}
        not_met = 0
        for reply in run.turns(1, 0):
            met = private.get(reply.client, set()) | set(run.world.plan.observed(reply.client, 1))
            changed = set((reply.weights()["head"]["weight"] != start).any(1).nonzero().flatten().tolist())
            assert (old - met <= changed) if weight else changed <= met
            not_met += len(old - met)
        assert not_met > 0


def test_the_contrastive_loss_is_its_definition():
    rng = torch.Generator().manual_seed(0)
    z = torch.randn(4, 3, generator=rng)
    pseudo = torch.randn(5, 3, generator=rng)
    y = torch.tensor([6, 6, 2, 8])
    of = torch.tensor([6, 2, 1, 1, 1])
    points = F.normalize(torch.cat([z, pseudo]), dim=1)
    labels = torch.cat([y, of]).tolist()
    total = 0.0
    for i in range(4):
        others = [j for j in range(9) if j != i]
        positives = [j for j in others if labels[j] == labels[i]]
        share = torch.stack([points[i] @ points[j] for j in others]).log_softmax(0)
        total -= sum(float(share[others.index(j)]) for j in positives) / max(1, len(positives))
    assert float(contrastive(z, y, pseudo, of)) == pytest.approx(total / 4, rel=1e-5)


def test_training_with_the_contrastive_loss_lowers_it(fresh):
    """Both trainings start from the same server, so that the prototypes are the same too."""
    run = second_position(fresh, rehearse=0.0, train__epochs=8, lr=0.02, params__temperature=1.0, setting="homogeneous")
    usual = run.method.params
    block = run.server.blocks["prototypes"]

    def loss_after(weight: float) -> float:
        run.method.params = replace(usual, contrast=weight)
        total = 0.0
        for reply in run.turns(0, 2):
            client = run.client(reply.client, 0, 2)
            weights = reply.weights()
            z = Tail(weights["adapter"], {}).adapt(client.features(weights["base"]))
            total += float(contrastive(z, client.y, block.tensors["mean"], torch.tensor(block.labels)))
        return total / len(run.clients(0, 2))

    assert loss_after(10.0) < loss_after(0.0) - 0.1


# -- the budget -------------------------------------------------------------------------------------------------------


def test_the_log_has_the_requested_and_the_served_replay(fresh):
    """A class is old for a client once the federation has seen it, and can be served once it has a prototype."""
    run = second_position(fresh, quota=7, train__batch=16, train__epochs=2)
    known = set(bank(run.server))
    for reply in run.turns(1, 0):
        client = run.client(reply.client, 1, 0)
        old = set(client.seen) - set(client.labels)
        assert reply.notes["replay_requested"] == 2 * 7 * len(old)
        assert 0 <= reply.notes["replay_served"] - 2 * 7 * len(old & known) < 2 * -(-len(client.current) // 16)
    assert all(r.notes["replay_served"] == 0 for r in fresh("fedspace", setting="homogeneous").turns(0, 0))


def test_the_expanded_regime_has_more_samples_and_more_prototypes(fresh):
    run = second_position(fresh, setting="homogeneous", regime="expanded")
    assert (run.method.params.quota, run.method.params.prototypes) == (100, 5)
    block = run.server.blocks["prototypes"]
    assert {block.labels.count(y) for y in block.labels} == {5}
    _, found = constants(run, 1, 0)[0]
    assert found["mean"].shape == (2, 5, run.world.net.features)
    pseudo, of = sample_pseudo_features(found | {"radius": torch.tensor(0.0), "rng": torch.Generator().manual_seed(0)})
    assert {tuple(p.tolist()) for p in pseudo} == {tuple(p.tolist()) for p in block.tensors["mean"]}
    assert all(int((block.tensors["mean"] == p).all(1).nonzero()[0]) // 5 == sorted(set(block.labels)).index(int(y))
               for p, y in zip(pseudo, of, strict=True))  # fmt: skip


def test_the_diagnostics_get_samples_around_the_prototypes(fresh):
    run = second_position(fresh, setting="homogeneous", regime="expanded")
    block = run.server.blocks["prototypes"]
    radius = float(run.server.blocks["radius"].tensors["radius"])
    label = block.labels[0]
    rng = torch.Generator().manual_seed(0)
    samples = run.method.replay(run.world.net, run.server, [], label, 1000, rng)
    noise = samples.tensors[0].view(200, 5, -1) - block.tensors["mean"][:5]
    assert samples.space == "adapted" and abs(float(noise.std()) - radius) < 0.05 * radius
    unknown = next(y for y in range(10) if y not in block.labels)
    assert run.method.replay(run.world.net, run.server, [], unknown, 5, rng) is None
