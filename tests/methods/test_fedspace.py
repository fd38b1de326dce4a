"""FedSpace: prototypes that persist, pseudo-features within their budget, slow aggregation, classes met."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from profcil.encoders.model import Tail
from profcil.methods.base import average
from profcil.methods.fedspace import contrastive, imagined, radius_of


def bank(server) -> dict[int, torch.Tensor]:
    block = server.blocks["prototypes"]
    return dict(zip(block.labels, block.tensors["mean"], strict=True))


def second(fresh, **settings):
    """A run at the start of its second position."""
    run = fresh("fedspace", participants=4, **settings)
    for r in range(3):
        run.play(0, r)
    return run


def constants(run, position: int, round: int) -> list[tuple[object, dict[str, torch.Tensor]]]:
    """Every participant, and what its loss is told."""
    found = []
    for c in run.clients(position, round):
        client = run.world.client(c, run.when(position, round), run.state.private.get(c))
        found.append((client, next(run.method.turn(client, dict(run.server.blocks))).constants))
    return found


# -- the server -------------------------------------------------------------------------------------------------------


def test_prototypes_of_absent_classes_persist(tiny):
    run = tiny("fedspace")
    before, away = run.before(), 0
    for what, when, server in run.trail:
        if what == "round":
            observed = [run.world.plan.observed(c, when.position) for c in run.clients(when.position, when.round)]
            old, new, told = bank(before[when.position, when.round]), bank(server), {y for o in observed for y in o}
            assert new.keys() == old.keys() | told
            assert all(torch.equal(new[y], old[y]) for y in old.keys() - told)
            away += len(old.keys() - told)
    assert away > 0


def test_model_and_prototypes_move_slowly(fresh):
    run = second(fresh, inertia=0.75, rate=0.2, setting="homogeneous")
    old = run.server
    replies = run.turns(0, 2)
    reached, reports = average(replies), [r.blocks["prototypes"] for r in replies]
    new = run.play(0, 2)
    for b, tensors in new.weights().items():
        for k, t in tensors.items():
            torch.testing.assert_close(t, 0.75 * old.weights()[b][k] + 0.25 * reached[b][k])
    total = sum(r.tensors["count"] for r in reports)
    pooled = sum(r.tensors["mean"] * (r.tensors["count"] / total)[:, None] for r in reports)
    for label, mean in zip(reports[0].labels, pooled, strict=True):
        torch.testing.assert_close(bank(new)[label], 0.8 * bank(old)[label] + 0.2 * mean)


def test_the_radius_is_measured_in_a_clients_first_position_only(fresh):
    run = second(fresh, setting="homogeneous")
    assert float(run.server.blocks["radius"].tensors["radius"]) > 0
    assert all("radius" in r.blocks for r in run.turns(0, 2))
    assert not any("radius" in r.blocks for r in run.turns(1, 0))


def test_the_radius_is_the_root_of_the_mean_variance():
    z = torch.randn(300, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 0.1, 0.0]) + 9
    y = torch.arange(300) % 3 + 4
    variance = torch.stack([z[y == c].var(0, correction=0).mean() for c in (4, 5, 6)])
    torch.testing.assert_close(radius_of(z, y), variance.mean().sqrt(), rtol=1e-4, atol=0)


def test_stripped_of_its_parts_the_first_round_is_fedavgs_to_the_bit(fresh):
    bare = fresh("fedspace", params__temperature=1.0, inertia=0.0, label_space="seen")
    ours, plain = (run.play(0, 0).weights() for run in (bare, fresh("fedavg")))
    assert all(torch.equal(t, plain[b][k]) for b in plain for k, t in ours[b].items())


# -- the client -------------------------------------------------------------------------------------------------------


def test_a_client_remembers_the_classes_it_has_met(fresh):
    run, met = second(fresh), {}
    for p in range(run.world.plan.positions):
        for c in run.clients(p, 0):
            met.setdefault(c, set()).update(run.world.plan.observed(c, p))
        run.play(p, 0)
        for c in run.clients(p, 0):
            assert set(run.state.private[c]["met"].nonzero().flatten().tolist()) == met[c]
    assert any(len(m) > 2 for m in met.values())


@pytest.mark.parametrize("space", ["met", "seen"])
def test_the_loss_competes_over_the_chosen_classes(fresh, space):
    run = second(fresh, label_space=space)
    for client, told in constants(run, 1, 0):
        before = run.state.private.get(client.id, {}).get("met", torch.zeros(10, dtype=torch.bool))
        met = set(before.nonzero().flatten().tolist()) | set(client.labels)
        wanted = met if space == "met" else set(client.seen)
        assert set(told["allowed"].nonzero().flatten().tolist()) == wanted
        assert set(told["rehearsed"].nonzero().flatten().tolist()) == met | bank(run.server).keys()
        assert set(told["old"].nonzero().flatten().tolist()) == bank(run.server).keys() - set(client.labels)


def test_an_epoch_holds_the_quota_of_every_prototyped_class(fresh):
    run = second(fresh, quota=7, train__batch=16)
    for client, told in constants(run, 1, 0):
        steps, classes = -(-len(client.current) // 16), len(bank(run.server))
        assert 0 <= steps * len(told["place"]) - 7 * classes < steps
        _, of = imagined(told | {"rng": torch.Generator().manual_seed(0)})
        each = [int((of == y).sum()) for y in bank(run.server)]
        assert max(each) - min(each) <= 1


def test_pseudo_features_lie_around_their_prototypes(fresh):
    run = second(fresh, quota=200)
    _, told = constants(run, 1, 0)[0]
    pseudo, of = imagined(told | {"radius": torch.tensor(0.5), "rng": torch.Generator().manual_seed(0)})
    noise = pseudo - torch.stack([bank(run.server)[int(y)] for y in of])
    assert abs(float(noise.mean())) < 0.05
    assert 0.45 < float(noise.std()) < 0.55


def test_rehearsal_trains_the_heads_rows_of_absent_classes(fresh):
    """Rows that the client has never met move only because of pseudo-features."""
    for weight in (0.0, 1.0):
        run = second(fresh, rehearse=weight, contrast=0.0, weight_decay=0.0)
        start, old = run.server.weights()["head"]["weight"], set(bank(run.server))
        private = {c: set(own["met"].nonzero().flatten().tolist()) for c, own in run.state.private.items()}
        strangers = 0
        for reply in run.turns(1, 0):
            met = private.get(reply.client, set()) | set(run.world.plan.observed(reply.client, 1))
            changed = set((reply.weights()["head"]["weight"] != start).any(1).nonzero().flatten().tolist())
            assert (old - met <= changed) if weight else changed <= met
            strangers += len(old - met)
        assert strangers > 0


def test_the_contrastive_loss_is_its_definition():
    rng = torch.Generator().manual_seed(0)
    z, pseudo = torch.randn(4, 3, generator=rng), torch.randn(5, 3, generator=rng)
    y, of = torch.tensor([6, 6, 2, 8]), torch.tensor([6, 2, 1, 1, 1])
    points, labels = F.normalize(torch.cat([z, pseudo]), dim=1), torch.cat([y, of]).tolist()
    total = 0.0
    for i in range(4):
        others = [j for j in range(9) if j != i]
        friends = [j for j in others if labels[j] == labels[i]]
        share = torch.stack([points[i] @ points[j] for j in others]).log_softmax(0)
        total -= sum(float(share[others.index(j)]) for j in friends) / max(1, len(friends))
    assert float(contrastive(z, y, pseudo, of)) == pytest.approx(total / 4, rel=1e-5)


def test_training_with_the_contrastive_loss_lowers_it(fresh):
    """From one and the same server, so that the prototypes are the same too."""
    run = second(fresh, rehearse=0.0, train__epochs=8, lr=0.05, setting="homogeneous")
    usual, block = run.method.params, run.server.blocks["prototypes"]

    def reached(weight: float) -> float:
        run.method.params = replace(usual, contrast=weight)
        total = 0.0
        for reply in run.turns(0, 2):
            client, weights = run.client(reply.client, 0, 2), reply.weights()
            z = Tail(weights["adapter"], {}).adapt(client.features(weights["base"]))
            total += float(contrastive(z, client.y, block.tensors["mean"], torch.tensor(block.labels)))
        return total / len(run.clients(0, 2))

    assert reached(10.0) < reached(0.0) - 0.1


# -- the edges of the stream, for all methods of this kind ------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedproto", "fedssi", "fedspace"])
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_clients_with_one_example_and_classes_that_return(fresh, deal, method, norm):
    """Client 0 holds one example of every task, client 1 many, and each meets the tasks in an order of its own."""

    def owner(labels, tasks):
        given, count = [], dict.fromkeys(range(10), 0)
        first = {task[0] for task in tasks}
        for label in labels.tolist():
            count[label] += 1
            given.append(0 if label in first and count[label] == 1 else 1 if count[label] < 20 else -1)
        return given

    deal(owner, orders=[[0, 1, 2, 3, 4], [1, 0, 3, 4, 2]])
    run = fresh(method, clients=2, participants=2, model__norm=norm).stream()
    assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())
    assert all(bool(torch.isfinite(t).all()) for own in run.state.private.values() for t in own.values())
    assert (run.state.scores.correct[-1] >= 0).all()


@pytest.mark.parametrize("method", ["fedproto", "fedssi", "fedspace"])
def test_a_position_at_which_all_are_idle_changes_nothing(tiny, same_bits, method):
    run = tiny(method)
    idle = [p for p in range(run.world.plan.positions) if not len(run.world.plan.active(p))]
    assert idle
    after = [run.trail[0][2], *run.after_positions()]
    assert all(same_bits(after[p], after[p + 1]) for p in idle)


@pytest.mark.parametrize("method", ["fedproto", "fedssi", "fedspace"])
def test_a_single_client(tiny, method):
    run = tiny(method, clients=1, participants=1, setting="homogeneous")
    assert (run.state.scores.correct[-1] >= 0).all()
