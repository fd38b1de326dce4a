"""PRO-LIN: the base learns against a closed-form head, and the memory follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from profcil.engine import loop
from profcil.engine.channel import Block, When
from profcil.errors import ConfigError
from profcil.memory import linear, linear_drift, symmetric
from profcil.methods.parts.reported_clients import put_answered
from profcil.methods.parts.summaries import report, summary_of_report
from profcil.methods.prolin import ProLin
from profcil.metrics.client_first import summary

ALL = {"participants": 4}  # every client with data takes part in every round
PLAIN = {**ALL, "anchor": False}  # the memory has the moving features only
ALIKE = {"setting": "homogeneous", **ALL}  # and has the same two classes
BRISK = {"model__norm": "group", "train__lr": 0.01, **ALIKE}  # the base moves enough to see
FEW = {"setting": "homogeneous", "participants": 2}  # of four clients with data


def current(run, client: int, position: int, base) -> tuple[torch.Tensor, torch.Tensor]:
    """Features under a base and labels of a client's examples at a position."""
    made = run.client(client, position, 0)
    return made.features(dict(base.tensors)), made.y


def summary_of_all(run, clients, position: int, base) -> linear.Summary:
    """The pooled summary of some clients."""
    return linear.pool([linear.summarise(*current(run, c, position, base)) for c in clients])


def busy(run) -> list[int]:
    """The positions at which clients have data."""
    return [p for p in range(run.world.plan.positions) if len(run.world.plan.active(p))]


def at(run, position: int, since: int = 0):
    """A run after all rounds before a position."""
    for p in range(since, position):
        whole(run, p)
        run.world.forget_features()
    return run


def whole(run, position: int):
    """The server's state after all rounds of a position and its close."""
    rounds = run.world.config.train.rounds
    for r in range(rounds):
        run.play(position, r)
    with torch.no_grad():
        run.state.server = run.method.end_position(run.server, run.when(position, rounds - 1))
    return run.server


def memory_in(server) -> linear.Summary:
    """The memory in a server's state."""
    rows, gram = server.blocks["bank"].tensors, server.blocks["bank_gram"].tensors["gram"]
    return linear.Summary(
        server.blocks["bank"].labels, rows["count"].double(), rows["mean"].double(), symmetric.unpack(gram)
    )


def carried(old: linear.Summary, before, after) -> linear.Summary:
    """A memory moved by the linear map from the features `before` to their change. The map moves the first columns."""
    u = linear.append_one(before)
    change = (after - before[:, : after.shape[1]]).double()
    drift = linear_drift.Drift(u.T @ u, u.T @ change, change.T @ change)
    return linear_drift.apply_drift(old, *linear_drift.fit_drift(drift, 0.01))


def rows_of(memory: linear.Summary, labels) -> torch.Tensor:
    """The means of some classes."""
    return memory.mean[[memory.labels.index(y) for y in labels]]


def faa(run) -> float:
    return summary(run.state.scores.correct, run.state.scores.total, run.world.plan.orders)["faa"]


def same(one: Block, two: Block) -> bool:
    return all(torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors)


@pytest.mark.parametrize("empty", [0, 2], ids=["first", "last"])
def test_positions_with_an_empty_first_or_last_round_open_and_close(fresh, monkeypatch, empty):
    usual = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at == (1, empty) else usual(p, *at))
    run = fresh("prolin", train__rounds=3, **ALL).stream()
    before, after = run.after_positions()[:2]
    assert before.blocks.keys() == after.blocks.keys()
    assert not same(before.blocks["base"], after.blocks["base"])  # it has moved
    new = {y for c in run.world.plan.active(1) for y in run.world.plan.observed(int(c), 1)}
    assert new - set(before.blocks["bank"].labels) and new <= set(after.blocks["bank"].labels)


# -- the closed form ----------------------------------------------------------------------------------------------


def test_on_a_frozen_base_the_federated_head_equals_the_central_one(tiny):
    run = tiny("prolin", base_rounds=0, **ALL)
    base, plan = run.trail[0][2].blocks["base"], run.world.plan
    assert same(base, run.server.blocks["base"])
    rows = [current(run, int(c), p, base) for p in busy(run) for c in plan.active(p)]
    u, y = (torch.cat(column) for column in zip(*rows, strict=True))
    weight, bias = linear.lda(linear.summarise(u, y), 0.05)
    scores = run.method.scores(run.world.net, run.server, u)[:, torch.unique(y)]
    torch.testing.assert_close(scores, u.double() @ weight.T + bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("anchor", [True, False])
def test_a_position_opens_with_a_head_for_old_and_new_classes(fresh, anchor):
    run = at(fresh("prolin", anchor=anchor, **ALL), 1)
    before = run.server
    clients = run.clients(1, 0)
    stored = before.blocks["bank"].labels
    after = run.play(1, 0)
    parts = [linear.select_features(memory_in(before), range(run.world.net.features))]
    for c in clients:
        u, y = current(run, c, 1, before.blocks["base"])
        new = ~torch.isin(y, torch.tensor(stored))
        if new.any():
            parts.append(linear.summarise(u[new], y[new]))
    memory = linear.pool(parts)
    assert set(stored) < set(memory.labels) == set(after.blocks["training_head"].labels)
    weight, bias = linear.lda(memory, 0.3)
    torch.testing.assert_close(
        after.blocks["training_head"].tensors["weight"].double(), 0.2 * weight, rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(after.blocks["training_head"].tensors["bias"].double(), 0.2 * bias, rtol=1e-3, atol=1e-4)


def test_rounds_train_the_base_only(fresh):
    run = fresh("prolin", **ALL)
    start = run.server
    first = run.play(0, 0)
    second = run.play(0, 1)
    assert not same(start.blocks["base"], first.blocks["base"])
    assert not same(first.blocks["base"], second.blocks["base"])
    assert first.blocks["training_head"] is second.blocks["training_head"]
    assert same(first.blocks["starting_base"], start.blocks["base"])
    assert all(start.blocks[b] is second.blocks[b] for b in ("adapter", "head", "bank", "bank_gram"))


@pytest.mark.parametrize("base_rounds", [-1, 1])
def test_the_base_is_interpolated_by_the_share_of_earlier_examples(fresh, base_rounds):
    runs = [at(fresh("prolin", inertia=w, base_rounds=base_rounds, **ALL), 1) for w in (0.0, 2.0)]
    start = runs[0].server.blocks["base"]
    rounds = runs[0].world.config.train.rounds
    assert same(start, runs[1].server.blocks["base"])  # there were no earlier examples
    old = float(runs[0].server.blocks["bank"].tensors["count"].sum())
    new = sum(len(runs[0].client(c, 1, 0).y) for c in runs[0].clients(1, 0))
    free, held = ([run.play(1, r) for r in range(rounds)][-1].blocks["base"].tensors for run in runs)
    assert old and new
    for k, t in start.tensors.items():
        torch.testing.assert_close(held[k], t + (free[k] - t) * new / (new + 2 * old))
    assert any(not torch.equal(free[k], held[k]) for k in free)


def test_inertia_counts_the_examples_that_trained_the_base_only(fresh):
    run = fresh("prolin", inertia=1.0, base_rounds=1, **FEW)
    samples = []
    for p in range(3):
        samples.append(sum(len(run.client(c, p, 0).y) for c in run.clients(p, 0)))
        at(run, p + 1, since=p)
        assert int(run.server.blocks["past_samples"].tensors["samples"]) == sum(samples)
    assert float(run.server.blocks["bank"].tensors["count"].sum()) > sum(samples)


def test_the_base_is_interpolated_without_participants_in_the_last_round(fresh):
    run = at(fresh("prolin", inertia=2.0, **ALL), 1)
    start = run.server.blocks["base"].tensors
    rounds = run.world.config.train.rounds
    trained = [run.play(1, r) for r in range(rounds - 1)][-1]
    old = float(trained.blocks["bank"].tensors["count"].sum())
    new = sum(len(run.client(c, 1, 0).y) for c in run.clients(1, 0))
    after = run.method.aggregate(trained, [], When("round", 1, rounds - 1, rounds)).blocks
    for k, t in start.items():
        end = trained.blocks["base"].tensors[k]
        torch.testing.assert_close(after["base"].tensors[k], t + (end - t) * new / (new + 2 * old))
    assert "position_samples" not in after


@pytest.mark.parametrize("inertia", [0.0, 1.0])
def test_blocks_of_a_position_are_removed_when_it_closes(fresh, inertia):
    run = at(fresh("prolin", inertia=inertia), 1)
    lasting = {
        "base",
        "adapter",
        "head",
        "anchor",
        "bank",
        "bank_gram",
        "known_classes",
        *(("past_samples",) if inertia else ()),
    }
    assert set(run.server.blocks) == lasting
    assert run.server.blocks["known_classes"].labels == run.server.blocks["bank"].labels


# -- kept scores --------------------------------------------------------------------------------------------------


def second_position(fresh, **settings):
    """A run after the first round of the second position, the blocks that a client has then, and a client. It lacks the
    first position's classes."""
    run = at(fresh("prolin", **{**BRISK, **settings}), 1)
    run.play(1, 0)
    return run, dict(run.server.blocks), run.client(run.clients(1, 1)[0], 1, 1)


def test_a_turn_trains_the_base_against_the_starting_one(fresh):
    run, inbox, client = second_position(fresh)
    phase = next(run.method.turn(client, inbox))
    assert phase.blocks == ("base",)
    assert phase.proximal == pytest.approx(0.01)
    assert same(inbox["starting_base"], Block("model", phase.weights["starting_base"]))
    assert same(inbox["base"], Block("model", phase.weights["base"]))


def distance_of_scores(fresh, **settings) -> float:
    """How far a client's softmax over classes that it lacks is from that of the starting base, after a position."""
    long = {**BRISK, "train__epochs": 4, "train__lr": 0.005, "scale": 1.0, "proximal": 0.0}
    run = at(fresh("prolin", **long, **settings), 1)
    for r in range(2):
        run.play(1, r)
    total = 0.0
    for c in run.clients(1, 1):
        client = run.client(c, 1, 1)
        head = run.server.blocks["training_head"]
        others = [i for i, y in enumerate(head.labels) if y not in client.labels]
        weight, bias = (head.tensors[k][others] for k in ("weight", "bias"))
        start, now = (
            (client.features(run.server.blocks[b]) @ weight.T + bias).log_softmax(1) for b in ("starting_base", "base")
        )
        total += float((start.exp() * (start - now)).sum(1).mean())
    return total


def test_kept_scores_stay_nearer_to_those_of_the_starting_base(fresh):
    kept, free = (distance_of_scores(fresh, keep_scores=w) for w in (2.0, 0.0))
    assert 0 < kept < 0.5 * free


def loss_of(run, client, inbox, weight, bias) -> torch.Tensor:
    """The loss of a client's turn on all its examples, as a function of the head."""
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    net.load(phase.weights)
    batch = {
        **phase.constants,
        "inputs": client.examples.inputs(client.current),
        "y": client.y,
        "rng": torch.Generator().manual_seed(0),
        "weight": weight,
        "bias": bias,
    }
    return run.method.fit_loss(net, batch)


@pytest.mark.parametrize("keep", [0.0, 2.0])
def test_the_cross_entropy_competes_over_the_clients_own_classes_only(fresh, keep):
    """A class that a client lacks has no gradient, unless its score is kept."""
    run, inbox, client = second_position(fresh, keep_scores=keep, dictionary=12)
    phase = next(run.method.turn(client, inbox))
    weight, bias = (phase.constants[k].clone().requires_grad_() for k in ("weight", "bias"))
    loss_of(run, client, inbox, weight, bias).backward()
    moved = weight.grad.abs().sum(1) + bias.grad.abs()
    head = inbox["training_head"].labels
    lacking = [y for y in head if y not in client.labels]
    absent = [y for y in range(10) if y not in head]
    assert all(float(moved[y]) > 0 for y in client.labels if y in head)
    assert all((float(moved[y]) > 0) == bool(keep) for y in lacking)
    assert not moved[absent].any()


def test_kept_scores_leave_a_clients_own_classes_alone(fresh):
    """The rows of its own classes have the same gradient with and without kept scores."""
    run, inbox, client = second_position(fresh)
    params = run.method.params
    gradients = []
    for keep in (0.0, 2.0):
        run.method = ProLin(replace(params, keep_scores=keep))
        phase = next(run.method.turn(client, inbox))
        weight = phase.constants["weight"].clone().requires_grad_()
        loss_of(run, client, inbox, weight, phase.constants["bias"]).backward()
        gradients.append(weight.grad)
    own = list(client.labels)
    torch.testing.assert_close(gradients[0][own], gradients[1][own])
    assert not torch.allclose(*gradients)


def test_kept_scores_cost_nothing_where_the_base_has_not_moved(fresh):
    """At the starting base the kept scores have no gradient: they alone would not move it."""
    run, blocks, client = second_position(fresh)
    at_start = {**blocks, "base": blocks["starting_base"]}
    gradients = []
    for weight in (2.0, 0.0):
        run.method = ProLin(replace(run.method.params, keep_scores=weight))
        phase = next(run.method.turn(client, at_start))
        net = run.world.net
        loss = loss_of(run, client, at_start, phase.constants["weight"], phase.constants["bias"])
        gradients.append(torch.autograd.grad(loss, list(net.base.parameters())))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_examples_of_classes_without_statistics_are_not_trained_on(fresh):
    run = fresh("prolin", setting="homogeneous", **ALL)
    run.play(0, 0)
    clients = [run.client(c, 0, 1) for c in run.clients(0, 1)]
    client = next(c for c in clients if len(c.labels) > 1)
    part = client.labels[:1]
    head = run.server.blocks["training_head"]
    row = head.labels.index(part[0])
    cut = Block("model", {k: t[row : row + 1] for k, t in head.tensors.items()}, part)
    phase = next(run.method.turn(client, {**run.server.blocks, "training_head": cut}))
    assert set(phase.source.y.tolist()) == set(part)
    foreign = Block("model", cut.tensors, (next(y for y in range(10) if y not in client.labels),))
    with pytest.raises(StopIteration) as end:
        next(run.method.turn(client, {**run.server.blocks, "training_head": foreign}))
    assert not end.value.value.blocks
    assert (
        run.method.aggregate(run.server, [end.value.value], run.when(0, 1)).blocks["base"] is run.server.blocks["base"]
    )


# -- transport of the memory --------------------------------------------------------------------------------------


def test_closing_a_position_transports_the_old_memory_and_adds_fresh_statistics(fresh):
    run = at(fresh("prolin", anchor=False, **BRISK), 1)
    old = memory_in(run.server)
    start = run.server.blocks["base"]
    after = whole(run, 1)
    clients = run.clients(1, 2)
    final = after.blocks["base"]
    before, now = (torch.cat([current(run, c, 1, base)[0] for c in clients]) for base in (start, final))
    moved = carried(old, before, now)
    expected = linear.pool([moved, summary_of_all(run, clients, 1, final)])
    found = memory_in(after)
    assert not torch.allclose(moved.mean, old.mean, atol=1e-3)
    assert found.labels == expected.labels
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.gram, expected.gram, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("settings", [{}, {"base_rounds": 1}, {"train__rounds": 1}], ids=str)
def test_no_example_counts_twice_when_few_clients_take_part(fresh, settings):
    run = fresh("prolin", setting="homogeneous", participants=2, **settings)
    last = run.world.config.train.rounds - 1
    asked = range(last + 1) if settings.get("base_rounds") else (0, last)  # rounds with a report
    reporting = [set(run.clients(0, r)) for r in asked]
    assert settings.get("train__rounds") or any(clients != reporting[0] for clients in reporting)
    whole(run, 0)
    examples = sum(len(run.client(c, 0, 0).current) for c in set.union(*reporting))
    memory = memory_in(run.server)
    assert float(memory.count.sum()) == examples
    assert float(memory.gram[-1, -1]) == pytest.approx(examples, rel=1e-5)


@pytest.mark.parametrize("base_rounds", [0, 1])
def test_each_participant_is_surveyed_once_after_the_base_is_frozen(fresh, base_rounds):
    run = fresh("prolin", base_rounds=base_rounds, dictionary=10, train__rounds=4, **FEW)
    frozen = range(max(0, base_rounds - 1), 4)  # rounds after which the base is frozen
    reporting = sorted({c for r in frozen for c in run.clients(0, r)})
    assert len(reporting) > 2  # more than a single round has
    whole(run, 0)
    up = {"stage": "refresh", "position": 0, "direction": "up", "kind": "statistics"}
    for c in reporting:
        sent = [r for r in range(4) if run.ledger.total(client=c, round=r, **up)]
        first = min(r for r in frozen if c in run.clients(0, r))
        opened = base_rounds and c in run.clients(0, 0)
        assert sent == sorted({*([0] if opened else []), first})
    expected = summary_of_all(run, reporting, 0, run.server.blocks["base"])
    found = memory_in(run.server)
    assert found.labels == expected.labels
    assert torch.equal(found.count, expected.count)
    d = run.world.net.features
    torch.testing.assert_close(found.mean[:, :d], expected.mean, rtol=1e-3, atol=1e-4)
    rows = [*range(d), found.mean.shape[1]]
    torch.testing.assert_close(found.gram[rows][:, rows], expected.gram, rtol=1e-3, atol=1e-2)
    assert not {"reported_clients", "reported", "reported_gram"} & run.server.blocks.keys()


def test_reports_are_not_lost_without_participants_in_the_last_round(fresh, monkeypatch):
    usual = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at[1] == 2 else usual(p, *at))
    run = fresh("prolin", base_rounds=0, **FEW).stream()
    count = 0
    for p in range(max(busy(run)) + 1):
        clients = {*usual(run.world.plan, p, 0), *usual(run.world.plan, p, 1)}
        count += sum(len(run.client(c, p, 0).y) for c in clients)
    assert float(memory_in(run.server).count.sum()) == count


def test_reports_of_several_rounds_are_added(fresh):
    """Two rounds with two clients each give the same as one round with four."""
    run = at(fresh("prolin", **{**ALL, "setting": "homogeneous"}), 1)
    for r in range(2):
        run.play(1, r)
    inbox = dict(run.server.blocks)
    clients = run.clients(1, 1)
    replies = [run.method.survey(run.client(c, 1, 1), inbox) for c in clients]

    def added(state, some):
        return run.method.add_reports(put_answered(state, some), some)

    once = added(run.server, replies)
    twice = added(added(run.server, replies[:2]), replies[2:])
    assert once.blocks["reported_clients"].tensors["clients"].tolist() == list(clients)
    for name in ("reported_clients", "reported", "reported_gram"):
        for k, t in once.blocks[name].tensors.items():
            torch.testing.assert_close(twice.blocks[name].tensors[k], t, rtol=1e-3, atol=1e-3)
    again = run.method.survey(
        run.client(clients[0], 1, 1), {**inbox, "reported_clients": once.blocks["reported_clients"]}
    )
    assert not again.blocks


def test_counts_means_and_matrix_stay_consistent_over_a_stream(tiny):
    for server in tiny("prolin").after_positions():
        memory = memory_in(server)
        if not memory.labels:
            continue
        assert float(memory.gram[-1, -1]) == pytest.approx(float(memory.count.sum()), rel=1e-5)
        total = (memory.count[:, None] * memory.mean).sum(0)
        torch.testing.assert_close(memory.gram[-1, :-1], total, rtol=1e-3, atol=1e-2)
        assert float(torch.linalg.eigvalsh(linear.within_class_covariance(memory))[0]) > -1e-5


@pytest.mark.parametrize("transport", ["linear", "none"])
def test_old_means_move_with_transport_only(fresh, transport):
    run = at(fresh("prolin", transport=transport, **ALL), 1)
    before = memory_in(run.server)
    whole(run, 1)
    observed = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    old = [y for y in before.labels if y not in observed]
    assert old
    one, two = (rows_of(m, old) for m in (before, memory_in(run.server)))
    assert torch.allclose(one, two, atol=1e-5) == (transport == "none")


def error_of_old_means(fresh, transport: str) -> float:
    """The squared distance of old classes' moving means from their true ones under the new base, after a position."""
    run = at(fresh("prolin", transport=transport, keep_scores=0.0, proximal=0.0, **BRISK), 1)
    kept = memory_in(run.server).labels
    at(run, 2, since=1)
    observed = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    old = [y for y in kept if y not in observed]
    true = summary_of_all(run, run.world.plan.active(0).tolist(), 0, run.server.blocks["base"])
    assert old
    found = rows_of(memory_in(run.server), old)[:, : run.world.net.features]
    return float((found - rows_of(true, old)).square().sum())


def test_carried_means_are_nearer_to_the_true_ones_than_stale_ones(fresh):
    linear_map, stale = (error_of_old_means(fresh, transport) for transport in ("linear", "none"))
    assert linear_map < 0.5 * stale


# -- the other ablations ------------------------------------------------------------------------------------------


def test_with_a_frozen_base_rounds_send_nothing(tiny):
    run = tiny("prolin", base_rounds=0)
    assert {e.kind for e in run.ledger.entries if e.stage == "round"} <= {"header"}
    assert "anchor" not in run.server.blocks and "starting_base" not in run.world.net.attached


def test_the_base_stops_after_its_rounds(fresh):
    run = fresh("prolin", base_rounds=1)
    first = run.play(0, 0)
    second = run.play(0, 1)
    assert not same(first.blocks["base"], first.blocks["starting_base"])
    assert first.blocks["base"] is second.blocks["base"]


# -- the dictionary -----------------------------------------------------------------------------------------------


def dictionary_of_all(run) -> linear.Summary:
    """The summary of the dictionary's features of all clients at all positions."""
    clients = [run.client(int(c), p, 0) for p in busy(run) for c in run.world.plan.active(p)]
    entries = run.server.blocks["dictionary"]
    rows = [c.features(lambda net, x: run.method.dictionary_features(net, x, entries)) for c in clients]
    return linear.summarise(torch.cat(rows), torch.cat([c.y for c in clients]))


@pytest.mark.parametrize("settings", [{}, {"anchor": False}, {"base_rounds": 0}, {"inertia": 1.0}], ids=str)
def test_statistics_of_a_dictionary_are_exact(tiny, settings):
    """However the base moves, means and second moments are those of all reported examples."""
    run, plain = (tiny("prolin", dictionary=d, **{**ALL, **settings}) for d in (30, 0))
    found, true = memory_in(run.server), dictionary_of_all(run)
    width = plain.server.blocks["bank"].tensors["mean"].shape[1]
    assert found.mean.shape[1] == width + 30
    assert found.labels == true.labels
    assert torch.equal(found.count, true.count)
    assert float(true.mean.abs().max()) > 0.01
    torch.testing.assert_close(found.mean[:, width:], true.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.gram[width:, width:], true.gram, rtol=1e-4, atol=1e-3)
    assert run.ledger.total(kind="model") == plain.ledger.total(kind="model")


def in_order(fresh, assign_samples, orders) -> linear.Summary:
    """The memory after a stream in which client c has the tasks in the order `orders[c]`, on a frozen base."""
    assign_samples(lambda labels, tasks: np.arange(len(labels)) % 4, orders)
    run = fresh("prolin", base_rounds=0, dictionary=30, task_size=2, **ALL).stream()
    return memory_in(run.server)


def test_the_dictionary_alone_gives_the_same_memory_whatever_the_task_order(fresh, assign_samples):
    orders = [[0, 1, 2, 3, 4]] * 4, [[4, 2, 0, 1, 3]] * 4, [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]] * 2
    one, *others = (in_order(fresh, assign_samples, given) for given in orders)
    for two in others:
        assert one.labels == two.labels == tuple(range(10))
        assert torch.equal(one.count, two.count)
        torch.testing.assert_close(one.mean, two.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.gram, two.gram, rtol=1e-4, atol=1e-3)


def test_the_dictionary_sees_every_example_once(fresh, monkeypatch):
    """Its features are fixed: those of test examples are computed once a stream, those of a client once a position."""
    seen = []
    features = ProLin.dictionary_features

    def count(self, net, inputs, entries):
        seen.append(len(inputs[0]))
        return features(self, net, inputs, entries)

    monkeypatch.setattr(ProLin, "dictionary_features", count)
    run = fresh("prolin", base_rounds=2, dictionary=10, **ALL).stream()
    world = run.world
    of_clients = int(world.plan.counts.sum())
    assert sum(seen) == len(world.evaluation_examples) + of_clients


def test_too_wide_a_dictionary_is_an_error(fresh):
    with pytest.raises(ConfigError, match="dictionary = 100000"):
        fresh("prolin", dictionary=100_000)


def test_the_deployed_head_shrinks_a_dictionary_by_its_own_variance(tiny):
    run = tiny("prolin", base_rounds=0, dictionary=30, **ALL)
    memory = memory_in(run.server)
    z = torch.randn(7, run.world.net.features + 30)
    found = run.method.scores(run.world.net, run.server, z)[:, list(memory.labels)]
    for last, equal in ((30, True), (0, False)):
        weight, bias = linear.lda(memory, 0.05, last)
        assert torch.allclose(found, z.double() @ weight.T + bias) == equal


def test_a_dictionary_classifies_where_the_base_is_constant(fresh):
    """With a base whose weights are all zero, accuracy is at chance without a dictionary and high with one."""
    without, found = (fresh("prolin", base_rounds=0, dictionary=d, **ALL) for d in (0, 200))
    for run in (without, found):
        zeros = {k: torch.zeros_like(t) for k, t in run.server.blocks["base"].tensors.items()}
        run.state.server = run.server.put(base=Block("model", zeros))
        run.stream()
    assert faa(without) < 25
    assert faa(found) > 75


ALONE = {"anchor": False, "base_rounds": 0, "dictionary": 60, "warmup.rounds": 0}  # no network is used


def test_a_dictionary_alone_computes_and_sends_no_base(fresh, monkeypatch):
    run = fresh("prolin", **ALL, **ALONE)

    def forward(*_: Any, **__: Any) -> None:
        raise AssertionError("the base was computed")

    monkeypatch.setattr(type(run.world.net.base), "forward", forward)
    run.stream()
    assert memory_in(run.server).mean.shape == (10, 60)
    assert run.ledger.total(kind="model") == 0
    assert faa(run) > 75


def test_a_dictionary_alone_has_the_memory_of_its_features(tiny):
    run, whole = (tiny("prolin", **ALL, **{**ALONE, "anchor": anchor}) for anchor in (False, True))
    d = whole.world.net.features
    expected = linear.select_features(memory_in(whole.server), range(d, d + 60))
    found = memory_in(run.server)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.gram, expected.gram, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("unit", ["none", "example"])
def test_under_noise_features_are_normalised_in_sums_and_predictions(fresh, unit):
    noise = {"privacy.unit": unit, "privacy.noise_multiplier": 1e-6} if unit == "example" else {}
    run = fresh("prolin", **ALL, **ALONE, **noise).stream()
    own_mean = memory_in(run.server).mean.mean(1)
    assert (float(own_mean.abs().max()) < 1e-3) == (unit == "example")
    z = torch.rand(9, 60)
    one, other = (run.method.scores(run.world.net, run.server, rows) for rows in (z, 5 * z + 2))
    assert torch.allclose(one, other, rtol=1e-3, atol=1e-3) == (unit == "example")


def test_neither_a_base_nor_a_dictionary_is_refused(fresh):
    with pytest.raises(ConfigError, match="no features here; set dictionary"):
        fresh("prolin", anchor=False, base_rounds=0)


def test_a_client_is_sent_the_dictionary_once_and_stores_it(tiny):
    settings = {"base_rounds": 0, **ALL}
    run, plain = (tiny("prolin", dictionary=d, **settings) for d in (30, 0))
    size = run.server.blocks["dictionary"].bytes
    sent = {e.client for e in run.ledger.entries if e.kind == "memory" and e.stage == "refresh" and e.bytes >= size}
    assert sent == {int(c) for p in busy(run) for c in run.world.plan.active(p)}
    first, second = (r.ledger.total(kind="memory", stage="refresh") for r in (run, plain))  # the other: who reported
    assert first - second == size * len(sent)
    assert (run.state.client_bytes, plain.state.client_bytes) == (size, 0)


# -- reports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [0, 1, 2, 7, 8, 9, 60])
def test_a_report_holds_the_summary_of_its_examples(examples):
    """With fewer and more examples than features, with one, and with none."""
    rng = torch.Generator().manual_seed(examples)
    u = 3 * torch.randn(examples, 7, generator=rng) + 1
    y = torch.randint(4, (examples,), generator=rng) * 2 + 1
    sent = report(u, y)
    found, true = summary_of_report(sent), linear.summarise(u, y)
    assert found.labels == true.labels
    assert torch.equal(found.count, true.count)
    torch.testing.assert_close(found.mean, true.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.gram, true.gram, rtol=1e-5, atol=1e-5 * float(true.gram.abs().max() + 1))
    rows = min(examples, 8)
    assert sent["second_moments"].tensors["factor"].numel() == rows * 8 - rows * (rows - 1) // 2


def test_an_empty_report_with_labels_of_none_is_no_report(fresh):
    """A client whose classes are all in memory sends nothing at an opening."""
    run = fresh("prolin", **ALL)
    c = run.clients(0, 0)[0]
    client = run.client(c, 0, 0)
    known = Block("memory", {}, client.labels)
    inbox = {n: run.server.blocks[n] for n in ("base", "anchor")}
    assert run.method.survey(client, {**inbox, "known_classes": known}).blocks == {}
    assert run.method.survey(client, {**inbox, "known_classes": Block("memory", {}, ())}).blocks


# -- the anchor and the minimum support ---------------------------------------------------------------------------


def test_statistics_of_the_anchor_are_exact(tiny):
    """However the base moves, means of warmed-up features are exact, and those of moving features are not."""
    run = tiny("prolin", **ALL)
    plan, d, bank = run.world.plan, run.world.net.features, run.server.blocks["bank"]
    for half, base in enumerate(("base", "anchor")):
        rows = [current(run, int(c), p, run.server.blocks[base]) for p in busy(run) for c in plan.active(p)]
        true = linear.summarise(*(torch.cat(column) for column in zip(*rows, strict=True)))
        found = bank.tensors["mean"][:, half * d : (half + 1) * d]
        assert bank.labels == true.labels
        assert torch.allclose(found.double(), true.mean, atol=1e-4) == (base == "anchor")


def test_the_linear_map_reads_the_anchor_features(fresh):
    run = at(fresh("prolin", **ALL), 1)
    old = memory_in(run.server)
    start = run.server.blocks["base"]
    anchor = run.server.blocks["anchor"]
    final = whole(run, 1).blocks["base"]
    d = run.world.net.features
    pairs = [[current(run, c, 1, b)[0] for b in (start, anchor, final)] for c in run.clients(1, 2)]
    before, fixed, now = (torch.cat(column) for column in zip(*pairs, strict=True))
    moved = carried(old, torch.cat([before, fixed], 1), now)
    found = memory_in(run.server)
    observed = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    kept = [y for y in old.labels if y not in observed]
    one, two = (s.mean[[s.labels.index(y) for y in kept]] for s in (moved, found))
    assert kept
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert torch.allclose(one[:, d:], old.mean[[old.labels.index(y) for y in kept]][:, d:])


def test_statistics_of_classes_below_the_minimum_support_are_not_sent(fresh):
    run = fresh("prolin", **PLAIN)
    clients = {c: run.client(c, 0, 0) for c in run.clients(0, 0)}
    counts = [int((c.y == y).sum()) for c in clients.values() for y in c.labels]
    least = max(counts)
    run = fresh("prolin", min_support=least, **PLAIN)
    inbox = {n: run.server.blocks[n] for n in ("base", "known_classes")}
    for c in clients:
        enough = {y for y in clients[c].labels if int((clients[c].y == y).sum()) >= least}
        count = sum(int((clients[c].y == y).sum()) for y in enough)
        for blocks in (inbox, {"base": inbox["base"], "starting_base": inbox["base"]}):
            sent = run.method.survey(run.client(c, 0, 0), blocks).blocks
            assert bool(sent) == bool(enough)
            if enough:
                found = summary_of_report(sent)
                assert set(found.labels) == enough
                assert float(found.gram[-1, -1]) == pytest.approx(count, rel=1e-5)
    silent = fresh("prolin", min_support=10_000, **ALL).stream()  # no client has as many
    assert silent.ledger.total(kind="statistics") == 0
    assert not silent.server.blocks["bank"].labels
    assert same(silent.server.blocks["base"], silent.trail[0][2].blocks["base"])


# -- costs and benefits -------------------------------------------------------------------------------------------


def factor_numbers(examples: int, width: int) -> int:
    """The numbers in a factor of [z; 1] with `width` features."""
    rows = min(examples, width + 1)
    return rows * (width + 1) - rows * (rows - 1) // 2


@pytest.mark.parametrize("settings", [{}, {"anchor": False}, {"dictionary": 300}], ids=str)
def test_the_ledger_counts_means_counts_and_the_factor(fresh, settings):
    run = at(fresh("prolin", **settings, **ALL), 1)
    d = run.world.net.features
    wide = settings.get("dictionary", 0)
    width = (2 * d if settings.get("anchor", True) else d) + wide
    more_features = set()
    for c in run.clients(0, 0):
        client = run.client(c, 0, 0)
        n, classes = len(client.y), len(client.labels)
        where = {"stage": "refresh", "position": 0, "client": c, "direction": "up", "kind": "statistics"}
        for round, w in ((0, width), (2, width + d)):  # at the close with the change of the moving features
            assert run.ledger.total(round=round, **where) == 4 * (classes * (w + 1) + factor_numbers(n, w))
        more_features.add(n < width + 1)
    assert more_features == ({True} if wide else {False})  # the formula has two cases
    fixed = sum(run.server.blocks[b].bytes for b in ("anchor", "dictionary") if b in run.server.blocks)
    book = run.ledger
    sent = book.total(kind="memory", stage="refresh", position=0) + book.total(kind="memory", stage="round", position=0)
    ids = [e for e in book.entries if e.kind == "memory" and e.stage == "refresh" and e.round and e.position == 0]
    assert sent - sum(e.bytes for e in ids) == fixed * len(run.clients(0, 0))  # neither bank nor matrix is broadcast


def test_the_starting_base_is_sent_once_a_position(fresh):
    run = at(fresh("prolin", **ALL), 1)
    base, c = run.server.blocks["base"].bytes, run.clients(0, 0)[0]
    book = {(e.stage, e.round): e.bytes for e in run.ledger.entries if e.client == c and e.kind == "model" and down(e)}
    head = 4 * len(run.server.blocks["bank"].labels) * (run.world.net.features + 1)
    assert book["refresh", 0] == base  # opening: the base
    assert book["round", 0] == head
    assert book["round", 1] == base  # the aggregated base; the client has the starting base already
    assert book["round", 2] == book["refresh", 2] == base


def down(entry) -> bool:
    return entry.direction == "down" and entry.stage in ("round", "refresh") and entry.position == 0


def test_the_server_uses_no_gradients(fresh, monkeypatch):
    modes = set()
    for name in ("absorb", "aggregate", "end_position", "scores"):
        original = getattr(ProLin, name)

        def watching(self, *args, original=original):
            modes.add(torch.is_grad_enabled())
            return original(self, *args)

        monkeypatch.setattr(ProLin, name, watching)
    run = fresh("prolin").stream()
    assert modes == {False}
    assert not any(t.requires_grad for b in run.server.blocks.values() for t in b.tensors.values())


def test_other_methods_have_no_opening_survey(tiny):
    assert not any(e.stage == "refresh" for e in tiny("fedavg").ledger.entries)
    assert not any(e.stage == "refresh" and e.round == 0 for e in tiny("pro").ledger.entries)


def test_prolin_forgets_less_than_fedavg(tiny):
    same_for_both = {"train__rounds": 4, "train__lr": 0.01}
    assert faa(tiny("prolin", **same_for_both)) > faa(tiny("fedavg", **same_for_both)) + 20


def test_the_diagnostics_get_the_means_of_the_moving_features(tiny):
    run = tiny("prolin")
    memory, project = run.method.memories(run.world.net, run.server)["memory"]
    assert memory.tensors["mean"].shape == (len(memory.labels), run.world.net.features)
    d = run.world.net.features
    assert torch.equal(project(torch.arange(2 * d)[None]), torch.arange(d)[None])  # without the exact anchor features
