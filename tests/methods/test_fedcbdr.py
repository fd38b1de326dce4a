"""FedCBDR: exemplars are chosen by leverage scores of all features, stored by their owners, and replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profcil.engine.channel import When
from profcil.engine.phases import Trained
from profcil.methods.parts.exemplars import ReplaySource, basis, draw, join_inputs, leverages, rotation
from profcil.metrics.client_first import summary
from profcil.model.net import MODEL, Tail


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def low_rank(n: int, d: int, rank: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, rank, generator=rng(seed)) @ torch.randn(rank, d, generator=rng(seed + 1))


# -- exemplars --------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_leverages_are_the_diagonal_of_the_projection_and_their_sum_is_the_rank(n, d, rank, seed):
    x = low_rank(n, d, min(n, d, rank), seed)
    hat = x.double() @ torch.linalg.pinv(x.double(), rtol=1e-5)
    torch.testing.assert_close(leverages(x), hat.diagonal(), atol=1e-4, rtol=0)
    assert float(leverages(x).sum()) == pytest.approx(min(n, d, rank), abs=1e-4)


def test_rotations_do_not_change_leverages_once_the_private_ones_are_undone():
    x = low_rank(23, 9, 5)
    sizes = [10, 6, 7]
    q = rotation(9, rng(1))
    private = [rotation(n, rng(n)) for n in sizes]
    torch.testing.assert_close(q @ q.T, torch.eye(9), atol=1e-6, rtol=0)
    torch.testing.assert_close(leverages(x @ q), leverages(x), atol=1e-5, rtol=0)
    u = basis(torch.block_diag(*private) @ x @ q)
    undone = torch.cat([p.double().T @ part for p, part in zip(private, u.split(sizes), strict=True)])
    torch.testing.assert_close(undone.square().sum(1), leverages(x), atol=1e-5, rtol=0)
    assert float((u.square().sum(1) - leverages(x)).abs().max()) > 0.05  # without undoing, the scores are wrong
    alone = torch.cat([leverages(part) for part in x.split(sizes)])
    assert float((alone - leverages(x)).abs().max()) > 0.05  # scores of each client alone differ


def test_draws_are_without_replacement_and_in_proportion_to_scores():
    scores = torch.tensor([0.1, 0.0, 0.6, 0.3])
    first = torch.bincount(torch.cat([draw(scores, 1, rng(s)) for s in range(2000)]), minlength=4) / 2000
    assert first.tolist() == pytest.approx([0.1, 0.0, 0.6, 0.3], abs=0.04)
    assert draw(scores, 3, rng()).tolist() == [0, 2, 3]
    assert draw(scores, 9, rng()).tolist() == [0, 1, 2, 3]
    assert draw(scores, 0, rng()).tolist() == []


def test_an_epoch_has_each_current_example_once_and_the_quota_of_every_stored_class():
    y = torch.tensor([7, 7, 2, 2, 2, 5, 5, 5, 5])
    source = ReplaySource(torch.tensor([0, 1]), torch.tensor([2, 4, 5, 6, 7]), y, 5)
    epoch = source.epoch(rng())
    assert source.size == 12 == len(epoch["index"])
    assert torch.equal(epoch["y"], y[epoch["index"]])
    count = torch.bincount(epoch["index"], minlength=9).tolist()
    assert count[:2] == [1, 1]
    assert sorted((count[2], count[4])) == [2, 3]
    assert sorted(count[5:8]) == [1, 2, 2]
    assert count[3] == count[8] == 0


def test_inputs_of_several_clients_are_joined_without_common_edges():
    a, b = torch.zeros(2, 3), torch.ones(1, 3)
    assert torch.equal(join_inputs([(a,), (b,)])[0], torch.cat([a, b]))
    graphs = [
        (a, torch.tensor([[0, 1], [1, 0]]), torch.tensor([1])),
        (torch.ones(3, 3), torch.tensor([[0], [2]]), torch.tensor([2, 0])),
    ]
    x, edges, nodes = join_inputs(graphs)
    assert torch.equal(x, torch.cat([a, torch.ones(3, 3)]))
    assert edges.tolist() == [[0, 1, 2], [1, 0, 4]]
    assert nodes.tolist() == [1, 4, 2]


# -- choosing ---------------------------------------------------------------------------------------------------------


def surveyed(run, position: int, round: int) -> tuple[list, When]:
    when = When("refresh", position, round, round + 1)
    with torch.no_grad():
        return [
            run.method.survey(run.world.client(c, when), run.server.blocks) for c in run.clients(position, round)
        ], when


def test_the_server_scores_the_stacked_features_of_all_participants(fresh):
    run = fresh("fedcbdr", setting="homogeneous", budget=7)
    run.play(0, 0)
    replies, when = surveyed(run, 0, 2)
    assert len(replies) > 1
    plain = []
    for r in replies:
        client, sent = run.client(r.client, 0, 2), r.blocks["candidates"]
        u = client.features(run.server.blocks["base"])
        z = Tail(run.server.blocks["adapter"].tensors, {}).adapt(u)
        assert sent.tensors["features"].shape == z.shape
        assert float((sent.tensors["features"] - z).abs().max()) > 0.1  # it is rotated
        plain.append(z)
    together = torch.cat([r.blocks["candidates"].tensors["features"] for r in replies])
    torch.testing.assert_close(leverages(together), leverages(torch.cat(plain)), atol=1e-3, rtol=0)
    unrotated = [
        replace(r, blocks={"candidates": replace(b, tensors={**b.tensors, "features": z})})
        for r, z in zip(replies, plain, strict=True)
        for b in r.blocks.values()
    ]
    rotated, known = (run.method.absorb(run.server, x, when) for x in (replies, unrotated))
    for r in replies:
        picks = [s.blocks[f"keep/{r.client}"].tensors["rows"] for s in (rotated, known)]
        assert torch.equal(*picks)
        assert len(picks[0]) == 14


def test_examples_with_high_leverage_are_preferred(fresh):
    """One class on one client: thirty examples in one direction, ten examples with a direction of their own."""
    run = fresh("fedcbdr", setting="homogeneous", budget=10)
    replies, when = surveyed(run, 0, 2)
    one = replies[0].blocks["candidates"]
    features = torch.zeros(40, 16)
    features[:30, 0] = 1.0
    features[range(30, 40), range(1, 11)] = 1.0
    planted = replace(one, tensors={"features": features, "rows": torch.arange(40)}, labels=(3,) * 40)
    state = run.method.absorb(run.server, [replace(replies[0], blocks={"candidates": planted})], when)
    stored = state.blocks[f"keep/{replies[0].client}"].tensors["rows"]
    assert len(stored) == 10
    assert int((stored >= 30).sum()) >= 8  # uniform draws would give 2.5 on average
    assert state.blocks["stored"].tensors["count"].tolist() == [0, 0, 0, 10, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("setting", ["homogeneous", "severe"])
@pytest.mark.parametrize("storage", ["client", "federation"])
def test_stored_examples_are_the_clients_own_of_earlier_positions_and_within_the_budget(tiny, storage, setting):
    run = tiny("fedcbdr", storage=storage, setting=setting, budget=6)
    plan = run.world.plan
    y = run.world.bundle.train.y
    count = torch.zeros(10, dtype=torch.long)
    for c in range(4):
        picks = run.server.get(f"keep/{c}")
        private = run.state.private.get(c, {"rows": torch.tensor([], dtype=torch.long)})["rows"]
        rows = torch.unique(torch.cat([private, *([picks.tensors["rows"]] if picks else [])]))
        last = [p for p in range(plan.positions) if c in run.clients(p, 2)]  # positions in which it was surveyed
        mine = np.concatenate([np.empty(0, int), *(plan.samples(c, p) for p in last)])
        assert set(rows.tolist()) <= set(mine.tolist())
        own = torch.bincount(y[rows], minlength=10)
        held = np.bincount(y.numpy()[mine], minlength=10)
        if storage == "client":
            assert own.tolist() == np.minimum(held, 6).tolist()
        count += own
    assert torch.equal(count, run.server.blocks["stored"].tensors["count"])
    assert int(count.sum()) > 0
    if storage == "federation":
        assert set(count.tolist()) <= {0, 6}


def test_a_client_receives_its_own_picks_only(tiny):
    run = tiny("fedcbdr", setting="homogeneous")
    names = {c: {n for n in held if n.startswith("keep/")} for c, held in run.state.held.items()}
    assert any(names.values())
    assert all(received <= {f"keep/{c}"} for c, received in names.items())
    assert "stored" not in {n for held in run.state.held.values() for n in held}


def test_picks_are_sent_until_a_reply_confirms_them(fresh):
    """All turns of the second position are refused, but its survey takes place. No pick of the first one is lost."""
    run = fresh(
        "fedcbdr", setting="homogeneous", clients=2, participants=2, train__rounds=1, on_divergence="skip-client"
    )
    usual = run.world.config
    run.play(0, 0)
    first = {c: run.server.blocks[f"keep/{c}"].tensors["rows"] for c in (0, 1)}
    run.world.config = replace(usual, train=replace(usual.train, loss_limit=0.0))
    run.world.forget_features()
    run.play(1, 0)
    assert not any(len(own["rows"]) for own in run.state.private.values())
    both = {c: run.server.blocks[f"keep/{c}"].tensors["rows"] for c in (0, 1)}
    assert all(set(first[c].tolist()) < set(both[c].tolist()) for c in both)
    run.world.config = usual
    run.world.forget_features()
    run.play(2, 0)
    for c, own in run.state.private.items():
        assert torch.equal(own["rows"], both[c].sort().values)
        assert set(run.server.blocks[f"keep/{c}"].tensors["rows"].tolist()).isdisjoint(both[c].tolist())  # it has them
    assert run.state.private.keys() == {0, 1}


def test_draws_depend_on_the_seed_of_the_run(fresh):
    """The same candidates and scores, so that only the server's draw can differ."""
    runs = [fresh("fedcbdr", setting="homogeneous", budget=3, seed=s) for s in (0, 0, 1)]
    replies, when = surveyed(runs[0], 0, 2)
    states = [run.method.absorb(run.server, replies, when) for run in runs]
    one, same, other = ([s.blocks[f"keep/{r.client}"].tensors["rows"].tolist() for r in replies] for s in states)
    assert one == same != other


# -- training ---------------------------------------------------------------------------------------------------------


def second_task(run):
    """A client in its second position that has exemplars of the first, and its inbox."""
    for r in range(3):
        run.play(0, r)
    c = next(c for c in run.clients(1, 0) if f"keep/{c}" in run.server.blocks)
    client = run.client(c, 1, 0)
    return client, {n: run.server.blocks[n] for n in run.method.broadcast_to(c, run.server, client.when)}


def test_the_loss_of_an_epoch_is_the_papers_sum(fresh):
    run = fresh("fedcbdr", setting="homogeneous", budget=5, weight_old=1.4, weight_new=0.7)
    client, inbox = second_task(run)
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    net.load(run.server.weights())
    net.eval()
    net.augment = False
    rows = phase.source.epoch(rng())
    batch = rows | phase.constants | {"inputs": phase.inputs(rows["index"]), "rng": rng()}
    seen = list(client.seen)
    now = set(client.labels)
    with torch.no_grad():
        logits = net(*batch["inputs"])[:, seen] / torch.tensor([1.1 if y in now else 0.9 for y in seen])
        each = -logits.log_softmax(1)[range(len(rows["y"])), [seen.index(int(y)) for y in rows["y"]]]
        new = torch.tensor([int(y) in now for y in rows["y"]])
        expected = 1.4 * each[~new].mean() + 0.7 * each[new].mean()
        torch.testing.assert_close(phase.loss(net, batch), expected)
    assert int(new.sum()) == len(client.current)
    assert int((~new).sum()) == 5 * 2


def test_a_turn_stores_its_exemplars_and_logs_the_budget(fresh):
    run = fresh("fedcbdr", setting="homogeneous", budget=5, train__epochs=2, storage="client", participants=4)
    client, inbox = second_task(run)
    reply = next(r for r in run.turns(1, 0) if r.client == client.id)
    assert (reply.notes["replay_requested"], reply.notes["replay_served"]) == (20, 20)
    assert reply.notes["extra_bytes"] == 10 * 64  # images of 8 by 8 bytes
    assert torch.equal(run.state.private[client.id]["rows"], inbox[f"keep/{client.id}"].tensors["rows"])
    assert reply.private is None  # the private state does not leave the client


@pytest.mark.parametrize(("budget", "same"), [(0, True), (5, False)])
def test_without_replay_it_is_fedavg_to_the_bit(tiny, budget, same):
    plain, ours = (
        tiny(*m, setting="homogeneous", **s) for m, s in ((["fedavg"], {}), (["fedcbdr"], {"budget": budget}))
    )
    one = plain.server.weights()
    two = ours.server.weights()
    assert all(torch.equal(t, one[b][k]) for b in MODEL for k, t in two[b].items()) == same
    assert (ours.ledger.total(kind="replay") == 0) == same


def test_replayed_classes_compete_in_the_local_label_space(fresh):
    client, inbox = second_task(run := fresh("fedcbdr", setting="homogeneous", label_space="local", budget=3))
    allowed = next(run.method.turn(client, inbox)).constants["allowed"]
    assert set(allowed.nonzero().flatten().tolist()) == set(client.seen)  # both tasks of two classes


def test_replayed_classes_are_not_current_in_later_turns(fresh):
    """The cached mask of a client's labels must not include replayed classes in its next turn."""
    client, inbox = second_task(run := fresh("fedcbdr", setting="homogeneous", label_space="local", budget=3))
    sizes = [next(run.method.turn(run.client(client.id, 1, r), inbox)).source.size for r in range(3)]
    assert sizes == [len(client.current) + 3 * 2] * 3
    assert set(client.allowed(client.labels).nonzero().flatten().tolist()) == set(client.labels)


def test_replay_forgets_less(tiny):
    longer = {"setting": "homogeneous", "participants": 4, "train__rounds": 4, "train__epochs": 3, "model__width": 8}
    results = {}
    for budget in (0, 20):
        run = tiny("fedcbdr", budget=budget, **longer)
        s = run.state.scores
        results[budget] = summary(s.correct, s.total, run.world.plan.orders)
    assert results[20]["af"] < 0.5 * results[0]["af"]
    assert results[20]["faa"] > results[0]["faa"] + 30


def test_a_turn_with_half_the_budget_requests_half_the_epochs(fresh):
    run = fresh("fedcbdr", setting="homogeneous", budget=5, train__epochs=4, participants=4)
    client, inbox = second_task(run)
    client.budget = 0.5
    turn = run.method.turn(client, inbox)
    phase = next(turn)
    assert phase.epochs == 2
    with pytest.raises(StopIteration) as end:
        turn.send(Trained(phase.weights, 0.0, 1))
    assert end.value.value.notes["replay_requested"] == 2 * 5 * 2 == end.value.value.notes["replay_served"]


def test_the_expanded_regime_replays_five_times_as_much(tiny):
    run = tiny("fedcbdr", setting="homogeneous", regime="expanded")
    assert run.method.params.budget == 100
    assert (
        run.state.tally["replay_requested"]
        == 5 * tiny("fedcbdr", setting="homogeneous").state.tally["replay_requested"]
    )


def test_the_diagnostics_get_the_clients_own_examples(tiny):
    run = tiny("fedcbdr", setting="homogeneous", budget=6)
    last = run.when(run.world.plan.positions - 1, 2)
    clients = [run.world.client(c, last, own) for c, own in sorted(run.state.private.items())]
    every = run.method.replay(run.world.net, run.server, clients, 3, 999, rng())
    stored = int(run.server.blocks["stored"].tensors["count"][3])
    assert every.space == "inputs" and len(every.tensors[0]) == stored
    real = run.world.bundle.train.x[run.world.bundle.train.y == 3]
    assert all(bool((real == x).flatten(1).all(1).any()) for x in every.tensors[0])
    some = run.method.replay(run.world.net, run.server, clients, 3, 4, rng()).tensors[0]
    assert len(some) == 4
    assert run.method.replay(run.world.net, run.server, [], 3, 4, rng()) is None


# -- cost and edges ---------------------------------------------------------------------------------------------------


def test_the_ledger_has_features_up_and_row_numbers_down(tiny):
    run = tiny("fedcbdr", setting="homogeneous")
    plan = run.world.plan
    d = run.world.net.features
    surveyed = [(p, c) for p in range(plan.positions) for c in run.clients(p, 2)]
    examples = sum(len(plan.samples(c, p)) for p, c in surveyed)
    assert run.ledger.total(kind="replay", direction="up") == examples * (4 * d + 8)
    received = sum(len(own["rows"]) for own in run.state.private.values())
    assert run.ledger.total(kind="replay", direction="down") == received * 8 > 0
    stages = {(e.direction, e.stage) for e in run.ledger.entries if e.kind == "replay"}
    assert stages == {("up", "refresh"), ("down", "round")}


@pytest.mark.parametrize("storage", ["client", "federation"])
def test_clients_with_one_example_and_a_single_client(fresh, assign_samples, tiny, storage):
    def owner(labels, tasks):
        given = np.full(len(labels), -1)
        for task in tasks:
            for label in task:
                given[np.flatnonzero(labels == label)[5:45]] = 2
            given[np.flatnonzero(labels == task[0])[0]] = 0
            given[np.flatnonzero(labels == task[1])[0]] = 1
        return given

    alone = tiny("fedcbdr", storage=storage, clients=1, participants=1, setting="homogeneous")
    assign_samples(owner)
    few = fresh("fedcbdr", storage=storage, clients=3, participants=3).stream()
    for run in (alone, few):
        assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())
    want = 20 if storage == "federation" else 21
    assert few.server.blocks["stored"].tensors["count"].tolist() == [want] * 10
