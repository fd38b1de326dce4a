"""MOTION: a client's past is a coarse graph with the labels it was shown; updates are merged by coordinates."""

from __future__ import annotations

from dataclasses import replace

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

from profcil.engine.channel import Block, Reply
from profcil.errors import NotApplicable
from profcil.methods.motion import HIDDEN, coarsen, flatten, unflatten
from profcil.methods.parts.coarsening import (
    centrality,
    closed_pairs,
    coarse_graph,
    dissimilarity,
    merge_nodes,
    retention_score,
)
from profcil.methods.parts.merging import merge_weights, merged_step
from profcil.model.net import MODEL


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_edges(nodes: int, tries: int, seed: int = 0) -> torch.Tensor:
    ends = torch.randint(nodes, (2, tries), generator=rng(seed))
    ends = ends[:, ends[0] != ends[1]]
    return torch.unique(torch.cat([ends, ends.flip(0)], 1), dim=1)


# -- coarsening -------------------------------------------------------------------------------------------------------


def test_a_coarse_graph_has_mean_features_and_each_edge_between_clusters_once():
    x = torch.tensor([[0.0], [2.0], [10.0], [30.0]])
    edges = torch.tensor([[0, 1, 0, 2, 1, 2, 2, 3], [1, 0, 2, 0, 2, 1, 3, 2]])
    features, ends, place = coarse_graph(x, edges, torch.tensor([0, 0, 2, 3]))
    assert features.flatten().tolist() == [1.0, 10.0, 30.0]
    assert place.tolist() == [0, 0, 1, 2]
    assert sorted(map(tuple, ends.T.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    same = coarse_graph(x, edges, torch.arange(4))
    assert torch.equal(same[0], x)
    assert sorted(map(tuple, same[1].T.tolist())) == sorted(map(tuple, edges.T.tolist()))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.integers(0, 99))
def test_the_share_of_every_label_is_retained_and_the_others_are_merged_into_it(n, keep, seed):
    y = torch.randint(0, 4, (n,), generator=rng(seed)) * 3
    h = torch.randn(n, 5, generator=rng(seed + 1))
    score = torch.rand(n, generator=rng(seed + 2))
    protected = torch.rand(n, generator=rng(seed + 3)) < 0.2
    representative = merge_nodes(h, y, score, keep, protected)
    stay = representative == torch.arange(n)
    assert bool(stay[representative].all())  # a representative represents itself
    assert torch.equal(y[representative], y)  # and has the same label
    assert bool(stay[protected].all())
    for label in torch.unique(y):
        of = y == label
        assert int(stay[of].sum()) == max(1, int(protected[of].sum()), int(keep * int(of.sum()) + 0.5))
        free = of & ~protected
        if bool((free & stay).any()) and bool((free & ~stay).any()):
            assert score[free & stay].min() >= score[free & ~stay].max()


def test_a_node_is_merged_into_the_most_similar_retained_one():
    h = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.9, 0.2], [0.1, 5.0]])
    y = torch.zeros(4, dtype=torch.long)
    protected = torch.zeros(4, dtype=torch.bool)
    representative = merge_nodes(h, y, torch.tensor([0.9, 0.8, 0.1, 0.2]), 0.5, protected)
    assert representative.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("tries", [0, 40, 300])
def test_centralities_match_their_definitions(tries):
    edges = random_edges(25, tries)
    a = torch.zeros(25, 25, dtype=torch.float64)
    a[edges[0], edges[1]] = 1
    assert closed_pairs(edges, 25).tolist() == ((a @ a) * a).sum(1).tolist()
    found = centrality(edges, 25)
    assert found.shape == (25, 5)
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    if tries:
        degree = a.sum(1)
        torch.testing.assert_close(found[:, 0].double(), (degree - degree.min()) / (degree.max() - degree.min()))
        leading = torch.linalg.eigh(a + torch.eye(25))[1][:, -1].abs()
        assert float(torch.corrcoef(torch.stack([found[:, 3].double(), leading]))[0, 1]) > 0.99


def test_scores_are_deterministic_and_highest_for_hubs_and_outliers():
    star = torch.stack([torch.zeros(9, dtype=torch.long), torch.arange(1, 10)])
    edges = torch.cat([star, star.flip(0)], 1)
    h = torch.tensor([1.0, 2.0, 3.0, 4.0]) + 0.01 * torch.randn(10, 4, generator=rng())
    h[7] = torch.tensor([-3.0, 2.0, 0.0, -1.0])
    rows = torch.arange(10)
    score = retention_score(h, edges, rows, 10)
    assert torch.equal(score, retention_score(h, edges, rows, 10))
    assert int(centrality(edges, 10)[:, :4].mean(1).argmax()) == 0
    assert dissimilarity(h).argmax(0).tolist() == [7, 7, 7, 7]
    assert set(score.topk(2).indices.tolist()) == {0, 7}
    assert bool(torch.isfinite(retention_score(h[:1], edges[:, :0], rows[:1], 10)).all())


# -- the private state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["homogeneous", "severe"])
def test_coarse_nodes_have_the_true_label_and_hidden_labels_stay_hidden(on_graph, setting):  # noqa: F811
    run = on_graph("motion", setting=setting, reservoir=2).stream()
    plan = run.world.plan
    y = run.world.bundle.train.y
    merges = 0
    for c, own in run.state.private.items():
        had = [p for p in range(plan.positions) if any(c in run.clients(p, r) for r in range(3))]
        shown = np.isin(plan.owned(c), np.concatenate([plan.samples(c, p) for p in had]))
        true = y[torch.from_numpy(plan.owned(c).copy())]
        assert torch.equal(own["y"], torch.where(torch.from_numpy(shown), true, HIDDEN))
        assert torch.equal(true[own["cluster"]], true)
        alone = own["cluster"] == torch.arange(len(true))
        assert bool(alone[torch.from_numpy(~shown)].all())  # nodes with hidden labels are not merged
        merges += int((~alone).sum())
        graph, place = coarsen(run.world.share(c)[1], own)
        assert torch.equal(graph.y[place[torch.from_numpy(shown)]], true[torch.from_numpy(shown)])
    assert merges > 10


def test_hidden_labels_have_no_effect(on_graph, same_bits):  # noqa: F811
    """Training does not change if all hidden labels, of later positions and of test nodes, are wrong."""
    runs = [on_graph("motion", reservoir=2) for _ in range(2)]
    runs[1].world.bundle.test.y.fill_(0)
    for run, wrong in zip(runs, (False, True), strict=True):
        for r in range(4):
            p, r = divmod(r, 3)
            for c in run.clients(p, r) if wrong else ():
                owned, graph = run.world.share(c)
                plan = run.world.plan
                seen = np.isin(plan.owned(c), np.concatenate([plan.samples(c, q) for q in range(p + 1)]))
                true = run.world.bundle.train.y[owned]
                y = torch.where(torch.from_numpy(seen), true, (true + 1) % 6)
                run.world.shares[c] = (owned, replace(graph, y=y))
            run.play(p, r)
    assert same_bits(runs[0].server, runs[1].server)
    for c, own in runs[0].state.private.items():
        assert all(torch.equal(t, runs[1].state.private[c][k]) for k, t in own.items())


def test_a_client_coarsens_once_a_position_and_never_merges_the_reservoir(on_graph):  # noqa: F811
    run = on_graph("motion", reservoir=7)
    client, inbox = second_position(run)
    before = client.private["cluster"]
    assert torch.equal(before, torch.arange(len(before)))  # nothing is merged in the first position
    own = run.method.private(client, inbox)
    again = run.method.private(replace(client, private=own), inbox)
    assert torch.equal(own["cluster"], again["cluster"])
    merged = own["cluster"] != torch.arange(len(before))
    old = client.private["y"] != HIDDEN
    for label in torch.unique(client.private["y"][old]):
        of = client.private["y"] == label
        kept = run.method.reservoir(client, client.private["y"])
        least = max(int(int(of.sum()) * 0.5 + 0.5), int(of[kept].sum()))
        assert int((of & ~merged).sum()) == least
    assert len(kept) == 7
    assert not bool(merged[kept].any())


def test_the_reservoir_is_uniform_and_a_node_that_left_never_returns(on_graph):  # noqa: F811
    run = on_graph("motion", reservoir=5)
    client = run.client(0, 0, 0)
    y = torch.full((40,), HIDDEN)
    before: set[int] = set()
    for n in (3, 10, 25, 40):
        y[:n] = 1
        now = set(run.method.reservoir(client, y).tolist())
        assert len(now) == min(n, 5)
        assert not (now - before) & set(range(0 if n == 3 else {10: 3, 25: 10, 40: 25}[n]))
        before = now
    counts = torch.zeros(40)
    for c in range(300):
        counts[run.method.reservoir(replace(client, id=c), y)] += 1
    assert float(counts[:20].sum() / counts.sum()) == pytest.approx(0.5, abs=0.06)


# -- training ---------------------------------------------------------------------------------------------------------


def test_training_uses_the_clients_own_coarse_graph_and_shown_labels(on_graph):  # noqa: F811
    run = on_graph("motion", budget=4, reservoir=0)
    client, inbox = second_position(run)
    phase = next(run.method.turn(client, inbox))
    own = run.method.private(client, inbox)
    local = run.world.bundle.train.part(torch.from_numpy(run.world.plan.owned(client.id).copy()))
    place = coarsen(local, own)[1]
    ours = {tuple(e) for e in phase.constants["edges"].T.tolist()}
    assert ours == {tuple(e) for e in place[local.edges].T.tolist() if e[0] != e[1]}
    assert len(phase.constants["x"]) == int(place.max()) + 1 < len(local.x)
    rows = phase.source.epoch(rng())
    current = set(place[local.nodes[client.current]].tolist())
    old = [int(i) for i in rows["index"] if int(i) not in current]
    assert len(rows["index"]) - len(old) == len(current)
    assert len(old) == 4 * 2
    known = {int(place[i]): int(y) for i, y in enumerate(client.private["y"]) if int(y) != HIDDEN}
    assert all(known[int(i)] == int(y) for i, y in zip(rows["index"], rows["y"], strict=True) if int(i) in set(old))
    net = run.world.net
    net.load(run.server.weights())
    net.eval()
    with torch.no_grad():
        batch = rows | phase.constants | {"rng": rng()}
        logits = net(phase.constants["x"], phase.constants["edges"], rows["index"])[:, list(client.seen)]
        expected = torch.nn.functional.cross_entropy(
            logits, torch.tensor([client.seen.index(int(y)) for y in rows["y"]])
        )
        torch.testing.assert_close(phase.loss(net, batch), expected)


def test_a_turn_logs_the_budget_and_counts_the_coarse_past_as_memory(on_graph):  # noqa: F811
    run = on_graph("motion", budget=4, train__epochs=2, reservoir=0)
    client, inbox = second_position(run)
    graph, _ = coarsen(client.examples, run.method.private(client, inbox))
    answer = next(r for r in run.turns(1, 0) if r.client == client.id)
    assert (answer.notes["replay_requested"], answer.notes["replay_served"]) == (16, 16)
    old = int(((graph.y != HIDDEN) & ~torch.isin(graph.y, torch.tensor(client.labels))).sum())
    assert answer.notes["extra_bytes"] == old * 12 * 4
    assert answer.private is None


def test_replayed_classes_are_not_current_in_later_turns(on_graph):  # noqa: F811
    check_every_turn_replays(on_graph("motion", budget=3, label_space="local"))


def test_it_forgets_less_than_fedavg(on_graph):  # noqa: F811
    check_forgets_less_than_fedavg(on_graph, "motion")


# -- merging ----------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 5), st.integers(1, 60), st.sampled_from([0.0, 0.1, 1.0]), st.integers(0, 99))
def test_the_merge_of_equal_updates_is_this_update(clients, n, part, seed):
    update = 0.01 * torch.randn(n, generator=rng(seed))
    share = torch.rand(clients, generator=rng(seed + 1)) + 0.1
    together = update.expand(clients, n)
    torch.testing.assert_close(merged_step(together, share / share.sum(), part), update)
    still = merged_step(together, share / share.sum(), part, "still")
    moved = still != 0
    torch.testing.assert_close(still[moved], update[moved])


def test_only_large_coordinates_that_agree_with_the_others_have_a_weight():
    updates = 0.01 * torch.randn(3, 1000, generator=rng())
    updates[:, 0] = 0.05  # large for all, in the same direction
    updates[:, 1] = torch.tensor([0.05, -0.05, -0.05])  # the first disagrees with the others
    weight = merge_weights(updates, 0.1)
    assert (weight > 0).sum(1).tolist() == [100, 100, 100]
    assert weight[:, 0].tolist() == pytest.approx([1, 1, 1], abs=0.02)
    assert float(weight[0, 1]) == 0
    step = merged_step(updates, torch.tensor([0.5, 0.25, 0.25]), 0.1)
    assert float(step[0]) == pytest.approx(0.05)
    assert float(step[1]) == pytest.approx(-0.05)
    no_weight = (weight == 0).all(0)
    mean = (torch.tensor([0.5, 0.25, 0.25])[:, None] * updates).sum(0)
    torch.testing.assert_close(step[no_weight], mean[no_weight])
    assert float(merged_step(updates, torch.full((3,), 1 / 3), 0.1, "still")[no_weight].abs().max()) == 0
    assert torch.equal(merged_step(0 * updates, torch.full((3,), 1 / 3), 0.1), torch.zeros(1000))


def test_the_server_merges_equal_models_to_that_model_for_any_counts(on_graph):  # noqa: F811
    run = on_graph("motion")
    target = {b: {k: t + 0.01 * torch.randn(t.shape, generator=rng(3)) for k, t in ts.items()}
              for b, ts in run.server.weights().items()}  # fmt: skip
    blocks = {b: Block("model", target[b]) for b in MODEL}
    state = run.method.aggregate(
        run.server, [Reply(c, n, blocks) for c, n in ((0, 1), (1, 50), (2, 7))], run.when(0, 0)
    )
    for b in MODEL:
        for k, t in state.weights()[b].items():
            torch.testing.assert_close(t, target[b][k], atol=1e-6, rtol=1e-5)
    again = unflatten(flatten(target), target)
    assert all(torch.equal(t, target[b][k]) for b in MODEL for k, t in again[b].items())
    assert run.method.aggregate(run.server, [], run.when(0, 0)) is run.server


# -- edges ------------------------------------------------------------------------------------------------------------


def test_only_the_model_is_sent(on_graph):  # noqa: F811
    ours = on_graph("motion").stream()
    plain = on_graph("fedavg").stream()
    assert {e.kind for e in ours.ledger.entries} == {e.kind for e in plain.ledger.entries}
    assert ours.ledger.total() == plain.ledger.total()


def test_the_diagnostics_get_the_coarse_nodes_of_a_class_in_their_own_graphs(on_graph):  # noqa: F811
    run = on_graph("motion", reservoir=0)
    client, _ = second_position(run)
    run.play(1, 0)
    clients = [run.world.client(c, run.when(1, 1), p) for c, p in run.state.private.items()]
    graphs = [coarsen(c.examples, dict(c.private))[0] for c in clients]
    label = int(client.private["y"].max())
    x, edges, nodes = run.method.replay(run.world.net, run.server, clients, label, 500, rng()).tensors
    assert len(nodes) == sum(int((g.y == label).sum()) for g in graphs)
    assert torch.equal(x[nodes], torch.cat([g.x[g.y == label] for g in graphs]))
    owner = torch.cat([torch.full((len(g.x),), i) for i, g in enumerate(graphs)])
    assert torch.equal(owner[edges[0]], owner[edges[1]])
    assert edges.shape[1] == sum(g.edges.shape[1] for g in graphs)
    assert run.method.replay(run.world.net, run.server, [], label, 5, rng()) is None


def test_images_are_rejected_before_a_run(fresh):
    with pytest.raises(NotApplicable, match="Motion is made for graph, not for image"):
        fresh("motion")
