"""POWER: buffered nodes are replayed without edges, and the server distils on class means inverted from gradients."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_graph import (  # noqa: F401
    check_every_turn_replays,
    check_forgets_less_than_fedavg,
    on_graph,
    second_position,
)

from profcil.data.bundle import Nodes
from profcil.engine.channel import Block
from profcil.engine.server import Server
from profcil.errors import NotApplicable
from profcil.methods.parts.covering import cover
from profcil.methods.parts.inversion import HIDDEN, gradient_of, invert, label_of, make_shared_network
from profcil.methods.power import node_logits
from profcil.model.net import MODEL


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- inversion --------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 40), st.integers(2, 9), st.sampled_from([0.01, 0.1, 1.0]), st.integers(0, 99))
def test_a_vector_and_its_label_are_recovered_from_their_gradient(columns, classes, scale, seed):
    network = dict(make_shared_network(columns, classes, rng(seed)).items())
    x = scale * torch.randn(columns, generator=rng(seed + 1))
    label = seed % classes
    gradient = gradient_of(network, x, label)
    assert label_of(gradient) == label
    assert float((invert(network, gradient) - x).norm() / x.norm()) < 0.01


def test_the_inversion_of_another_gradient_is_another_vector():
    network = dict(make_shared_network(20, 5, rng()).items())
    one, two = torch.rand(2, 20, generator=rng(1))
    assert float((invert(network, gradient_of(network, one, 3)) - two).norm() / two.norm()) > 0.2


def test_the_server_recovers_the_class_means_of_every_client(on_graph):  # noqa: F811
    run = on_graph("power")
    server = run.play(0, 0)
    for c in run.clients(0, 0):
        client = run.client(c, 0, 0)
        found = server.blocks[f"pseudo/{c}/0"]
        assert found.labels == client.labels
        for label, x, count in zip(found.labels, found.tensors["x"], found.tensors["count"], strict=True):
            nodes = client.examples.nodes[client.current[client.y == label]]
            torch.testing.assert_close(x, client.examples.x[nodes].mean(0), atol=1e-3, rtol=0)
            assert int(count) == len(nodes)
    assert not [n for n in server.blocks if n.startswith(("local/", "gradients/"))]  # deleted after the round


@pytest.mark.parametrize("transfer", ["changed", "full"])
def test_gradients_and_shared_network_are_sent_once_a_position_or_less(on_graph, transfer):  # noqa: F811
    run = on_graph("power", transfer=transfer).stream()
    plan = run.world.plan
    sizes = (12, *HIDDEN, 6)
    floats = sum(a * b + b for a, b in pairwise(sizes))
    turns = {(c, p) for p in range(plan.positions) for r in range(3) for c in run.clients(p, r)}
    sent = sum(len(plan.observed(c, p)) for c, p in turns)
    receivers = len({c for c, _ in turns}) if transfer == "changed" else len(turns)
    assert run.ledger.total(kind="prototype", direction="up") == sent * (4 * floats + 4)
    assert run.ledger.total(kind="prototype", direction="down") == receivers * 4 * floats
    assert run.state.tally["server_seconds"] > 0


# -- the choice of nodes ----------------------------------------------------------------------------------------------


def test_chosen_nodes_cover_every_cluster_the_largest_first():
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    of = torch.tensor([0] * 3 + [1] * 12 + [2] * 6)
    points = centres[of] + 0.01 * torch.randn(21, 2, generator=rng())
    chosen = cover(points, 3, 0.1)
    assert of[chosen].tolist() == [1, 2, 0]
    assert of[cover(points, 4, 0.1)].tolist() == [1, 2, 0, 1]  # all are covered, so it starts again
    assert sorted(cover(points, 50, 0.1).tolist()) == list(range(21))
    assert cover(points, 0, 0.1).tolist() == []
    assert cover(points[:1], 2, 0.1).tolist() == [0]


@pytest.mark.parametrize("setting", ["homogeneous", "severe"])
def test_a_client_stores_up_to_the_budget_of_each_class_it_had(on_graph, setting):  # noqa: F811
    run = on_graph("power", setting=setting, budget=4).stream()
    plan = run.world.plan
    for c, own in run.state.private.items():
        had = [p for p in range(plan.positions) if any(c in run.clients(p, r) for r in range(3))]
        mine = np.concatenate([plan.samples(c, p) for p in had])
        y = run.world.bundle.train.y.numpy()
        rows = plan.owned(c)[own["rows"].numpy()]
        assert set(rows) <= set(mine)
        assert len(set(rows)) == len(rows)
        held = np.bincount(y[mine], minlength=6)
        assert np.bincount(y[rows], minlength=6).tolist() == np.minimum(held, 4).tolist()


# -- training ---------------------------------------------------------------------------------------------------------


def test_the_loss_weights_current_nodes_by_beta_and_replayed_ones_by_the_rest(on_graph):  # noqa: F811
    run = on_graph("power", budget=3, beta=0.2)
    client, inbox = second_position(run)
    phase = next(run.method.turn(client, inbox))
    net = run.world.net
    graph = client.examples
    kept = client.private["rows"]
    net.load(run.server.weights())
    net.eval()
    rows = phase.source.epoch(rng())
    batch = rows | phase.constants | {"rng": rng()}
    with torch.no_grad():
        ours = phase.loss(net, batch)
        allowed = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(client.seen), True)
        now = net(*graph.inputs(client.current)).masked_fill(~allowed, -1e30)
        alone = net(graph.x[graph.nodes[kept]], torch.zeros(2, 0, dtype=torch.long), torch.arange(len(kept)))
        then = alone.masked_fill(~allowed, -1e30)
        expected = 0.2 * torch.nn.functional.cross_entropy(now, client.y)
        expected += 0.8 * torch.nn.functional.cross_entropy(then, graph.y[kept])
    assert len(kept) == 6
    torch.testing.assert_close(ours, expected)


def test_all_edges_are_the_clients_own_and_replayed_nodes_have_none(on_graph):  # noqa: F811
    run = on_graph("power", budget=3)
    client, inbox = second_position(run)
    phase = next(run.method.turn(client, inbox))
    own = run.world.bundle.train.part(torch.from_numpy(run.world.plan.owned(client.id).copy()))
    assert torch.equal(phase.constants["edges"], own.edges)
    assert torch.equal(phase.constants["x"][: len(own.x)], own.x)
    assert int(phase.constants["edges"].max()) < len(own.x)
    assert len(phase.constants["x"]) == len(own.x) + 6
    targets = phase.constants["nodes"][phase.source.epoch(rng())["index"]]
    labelled = set(own.nodes[client.current].tolist()) | set(range(len(own.x), len(own.x) + 6))
    assert set(targets.tolist()) == labelled


def test_a_turn_logs_the_budget_and_counts_the_buffer_as_memory(on_graph):  # noqa: F811
    run = on_graph("power", budget=5, train__epochs=2)
    client, _ = second_position(run)
    answer = next(r for r in run.turns(1, 0) if r.client == client.id)
    assert (answer.notes["replay_requested"], answer.notes["replay_served"]) == (20, 20)
    assert answer.notes["extra_bytes"] == 10 * 12 * 4
    assert answer.private is None


@pytest.mark.parametrize(("settings", "same"), [({"budget": 0, "steps": 0}, True), ({"budget": 0}, False)])
def test_without_buffer_and_server_steps_it_is_fedavg_to_the_bit(on_graph, settings, same):  # noqa: F811
    plain = on_graph("fedavg").stream()
    ours = on_graph("power", **settings).stream()
    one = plain.server.weights()
    two = ours.server.weights()
    assert all(torch.equal(t, one[b][k]) for b in MODEL for k, t in two[b].items()) == same
    assert (ours.ledger.total(kind="prototype") == 0) == same


def test_replayed_classes_are_not_current_in_later_turns(on_graph):  # noqa: F811
    check_every_turn_replays(on_graph("power", budget=3, label_space="local"))


def test_it_forgets_less_than_fedavg(on_graph):  # noqa: F811
    check_forgets_less_than_fedavg(on_graph, "power")


# -- the server's steps -----------------------------------------------------------------------------------------------


def pseudo_nodes(run, labels: tuple[int, ...], count: list[int], seed: int) -> Block:
    x = torch.rand(len(labels), 12, generator=rng(seed))
    return Block("prototype", {"x": x, "count": torch.tensor(count)}, labels)


def other_model(run, seed: int) -> dict:
    """The model with another head."""
    weights = run.server.weights()
    return {**weights, "head": {"weight": torch.randn(6, 64, generator=rng(seed))}}


def server_at(run, position: int) -> Server:
    return run.world.server(run.when(position, 0))


def test_a_model_equal_to_its_teacher_does_not_change_and_another_comes_closer(on_graph):  # noqa: F811
    run = on_graph("power", steps=8, model__width=8)
    net = run.world.net
    start = run.server.weights()
    lessons = [("0", 0, pseudo_nodes(run, (0, 1), [3, 4], 1))]
    same = run.method.distil(server_at(run, 0), start, {"0": start}, lessons)
    assert all(torch.equal(t, start[b][k]) for b in MODEL for k, t in same[b].items())
    seen = list(server_at(run, 0).seen)
    teacher, x = other_model(run, 2), lessons[0][2].tensors["x"]
    moved = run.method.distil(server_at(run, 0), start, {"0": teacher}, lessons)
    with torch.no_grad():
        goal, before, after = (node_logits(net, w, x)[:, seen] for w in (teacher, start, moved))
    assert float((after - goal).abs().mean()) < 0.8 * float((before - goal).abs().mean())


def test_a_class_is_taught_by_the_client_that_had_it_last_and_most(on_graph):  # noqa: F811
    """Two teachers disagree about one class: the one with more nodes wins, unless its nodes are old."""
    run = on_graph("power", steps=8, model__width=8, fade=0.01)
    net = run.world.net
    start = run.server.weights()
    seen = list(server_at(run, 2).seen)
    teachers = {"0": other_model(run, 2), "1": other_model(run, 3)}

    def distances(position_of_first: int) -> list[float]:
        first, second = pseudo_nodes(run, (0,), [30], 1), pseudo_nodes(run, (0,), [3], 1)
        lessons = [("0", position_of_first, first), ("1", 2, second)]
        moved = run.method.distil(server_at(run, 2), start, teachers, lessons)
        x = first.tensors["x"]
        with torch.no_grad():
            views = [node_logits(net, w, x)[:, seen] for w in (moved, *teachers.values())]
        return [float((views[0] - v).abs().mean()) for v in views[1:]]

    assert distances(2)[0] < distances(2)[1]
    assert distances(0)[0] > distances(0)[1]


# -- edges ------------------------------------------------------------------------------------------------------------


def test_the_diagnostics_get_the_buffered_nodes_of_a_class_without_edges(on_graph):  # noqa: F811
    run = on_graph("power", budget=3)
    client, _ = second_position(run)
    clients = [run.world.client(c, run.when(1, 0), p) for c, p in run.state.private.items()]
    label = int(client.examples.y[client.private["rows"][0]])
    found = run.method.replay(run.world.net, run.server, clients, label, 50, rng())
    x, edges, nodes = found.tensors
    assert (found.space, x.shape, edges.shape) == ("inputs", (9, 12), (2, 0))
    assert nodes.tolist() == list(range(9))
    bundle = run.world.bundle.train
    assert isinstance(bundle, Nodes)
    real = bundle.x[bundle.nodes[bundle.y == label]]
    assert all(bool((row == real).all(1).any()) for row in x)
    assert run.method.replay(run.world.net, run.server, clients, client.labels[0], 50, rng()) is None


def test_images_are_rejected_before_a_run(fresh):
    with pytest.raises(NotApplicable, match="Power is made for graph, not for image"):
        fresh("power")
