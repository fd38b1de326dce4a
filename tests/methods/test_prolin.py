"""PRO-LIN: the base learns against a closed-form head, and the memory follows it."""

from __future__ import annotations

import pytest
import torch

from profcil.engine import loop
from profcil.engine.channel import When
from profcil.engine.payload import Block
from profcil.errors import ConfigError
from profcil.memory import linear
from profcil.methods.prolin import ProLin, anchor_names, memory_of
from profcil.metrics.client_first import summary

ALL = {"participants": 4}  # every client with data takes part in every round
PLAIN = {**ALL, "anchor": False}  # the memory has the moving features only
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
        for r in range(run.world.config.train.rounds):
            run.play(p, r)
        run.world.forget_features()
    return run


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


@pytest.mark.parametrize("form", ["lda", "ridge"])
def test_on_a_frozen_base_the_federated_head_equals_the_central_one(tiny, form):
    run = tiny("prolin", base_rounds=0, closed_form=form, **ALL)
    base, plan = run.trail[0][2].blocks["base"], run.world.plan
    assert same(base, run.server.blocks["base"])
    rows = [current(run, int(c), p, base) for p in busy(run) for c in plan.active(p)]
    u, y = (torch.cat(column) for column in zip(*rows, strict=True))
    weight, bias = getattr(linear, form)(linear.summarise(u, y), 0.05)
    scores = run.method.scores(run.world.net, run.server, u)[:, torch.unique(y)]
    torch.testing.assert_close(scores, u.double() @ weight.T + bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("anchor", [True, False])
def test_a_position_opens_with_a_head_for_old_and_new_classes(fresh, anchor):
    run = at(fresh("prolin", anchor=anchor, **ALL), 1)
    before = run.server
    clients = run.clients(1, 0)
    stored = before.blocks["bank"].labels
    after = run.play(1, 0)
    parts = [linear.select_features(memory_of(before), range(run.world.net.features))]
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
    assert all(start.blocks[b] is second.blocks[b] for b in ("adapter", "head", "bank", "gram"))


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
        "gram",
        "known_classes",
        *(("past_samples",) if inertia else ()),
    }
    assert set(run.server.blocks) == lasting
    assert run.server.blocks["known_classes"].labels == run.server.blocks["bank"].labels


def test_distillation_keeps_features_near_those_of_the_starting_base(fresh):
    run = fresh("prolin", **ALL)
    run.play(0, 0)
    client = run.client(run.clients(0, 1)[0], 0, 1)
    phase = next(run.method.turn(client, dict(run.server.blocks)))
    assert phase.blocks == ("base",)
    assert phase.proximal == pytest.approx(0.01)
    assert same(run.server.blocks["starting_base"], Block("model", phase.weights["starting_base"]))
    strong, weak = (moved(fresh, distill=w, proximal=0.0) for w in (1.0, 0.0))
    assert strong < weak


def moved(fresh, **settings) -> float:
    """The squared distance of current features from those under the starting base, after two rounds."""
    run = fresh("prolin", setting="homogeneous", model__norm="group", train__lr=0.01, **ALL, **settings)
    start = run.server.blocks["base"]
    for r in range(2):
        run.play(0, r)
    pairs = [
        (current(run, c, 0, start)[0], current(run, c, 0, run.server.blocks["base"])[0]) for c in run.clients(0, 0)
    ]
    return sum(float((a - b).square().sum()) for a, b in pairs)


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
    run = at(fresh("prolin", **PLAIN), 1)
    old = memory_of(run.server)
    start = run.server.blocks["base"]
    after = [run.play(1, r) for r in range(3)][-1]
    clients = run.clients(1, 2)
    final = after.blocks["base"]
    drift = [linear.measure_drift(current(run, c, 1, start)[0], current(run, c, 1, final)[0]) for c in clients]
    moved = linear.apply_drift(old, *linear.fit_drift(linear.pool_drift(drift), 0.1))
    expected = linear.pool([moved, summary_of_all(run, clients, 1, final)])
    found = memory_of(after)
    assert not torch.allclose(moved.mean, old.mean, atol=1e-3)
    assert found.labels == expected.labels
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.gram, expected.gram, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("settings", [{}, {"classifier": "rounds"}, {"train__rounds": 1}], ids=str)
def test_no_example_counts_twice_when_few_clients_take_part(fresh, settings):
    run = fresh("prolin", setting="homogeneous", participants=2, **settings)
    last = run.world.config.train.rounds - 1
    opened, closed = set(run.clients(0, 0)), set(run.clients(0, last))
    assert settings.get("train__rounds") or opened != closed
    for r in range(last + 1):
        run.play(0, r)
    examples = sum(len(run.client(c, 0, 0).current) for c in opened | closed)
    memory = memory_of(run.server)
    assert float(memory.count.sum()) == float(memory.gram[-1, -1]) == examples


@pytest.mark.parametrize("base_rounds", [0, 1])
def test_each_participant_is_surveyed_once_after_the_base_is_frozen(fresh, base_rounds):
    run = fresh("prolin", base_rounds=base_rounds, sketch=10, train__rounds=4, **FEW)
    frozen = range(max(0, base_rounds - 1), 4)  # rounds after which the base is frozen
    reporting = sorted({c for r in frozen for c in run.clients(0, r)})
    assert len(reporting) > 2  # more than a single round has
    for r in range(4):
        run.play(0, r)
    up = {"stage": "refresh", "position": 0, "direction": "up", "kind": "statistics"}
    for c in reporting:
        sent = [r for r in range(4) if run.ledger.total(client=c, round=r, **up)]
        first = min(r for r in frozen if c in run.clients(0, r))
        opened = base_rounds and c in run.clients(0, 0)
        assert sent == sorted({*([0] if opened else []), first})
    expected = summary_of_all(run, reporting, 0, run.server.blocks["base"])
    found = memory_of(run.server)
    assert found.labels == expected.labels
    assert torch.equal(found.count, expected.count)
    d = run.world.net.features
    torch.testing.assert_close(found.mean[:, :d], expected.mean, rtol=1e-3, atol=1e-4)
    rows = [*range(d), found.mean.shape[1]]
    torch.testing.assert_close(found.gram[rows][:, rows], expected.gram, rtol=1e-3, atol=1e-2)
    assert not {"reported_clients", "reported_statistics", "reported_drift"} & run.server.blocks.keys()


def test_reports_are_not_lost_without_participants_in_the_last_round(fresh, monkeypatch):
    usual = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at[1] == 2 else usual(p, *at))
    run = fresh("prolin", base_rounds=0, **FEW).stream()
    count = 0
    for p in range(max(busy(run)) + 1):
        clients = {*usual(run.world.plan, p, 0), *usual(run.world.plan, p, 1)}
        count += sum(len(run.client(c, p, 0).y) for c in clients)
    assert float(memory_of(run.server).count.sum()) == count


@pytest.mark.parametrize("transport", ["linear", "neighbours"])
def test_the_drift_is_pooled_over_all_reporting_clients(fresh, transport):
    """Two rounds with two clients each give the same as one round with four."""
    run = at(fresh("prolin", transport=transport, **{**ALL, "setting": "homogeneous"}), 1)
    for r in range(2):
        run.play(1, r)
    inbox = dict(run.server.blocks)
    clients = run.clients(1, 1)
    replies = [run.method.survey(run.client(c, 1, 1), inbox) for c in clients]
    once = run.method.add_reports(run.server, replies)
    twice = run.method.add_reports(run.method.add_reports(run.server, replies[:2]), replies[2:])
    assert once.blocks["reported_clients"].tensors["clients"].tolist() == list(clients)
    for name in ("reported_clients", "reported_statistics", "reported_drift"):
        for k, t in once.blocks[name].tensors.items():
            torch.testing.assert_close(twice.blocks[name].tensors[k], t, rtol=1e-3, atol=1e-4)
    again = run.method.survey(
        run.client(clients[0], 1, 1), {**inbox, "reported_clients": once.blocks["reported_clients"]}
    )
    assert not again.blocks


def test_counts_means_and_matrix_stay_consistent_over_a_stream(tiny):
    for server in tiny("prolin").after_positions():
        memory = memory_of(server)
        if not memory.labels:
            continue
        assert float(memory.gram[-1, -1]) == float(memory.count.sum())
        total = (memory.count[:, None] * memory.mean).sum(0)
        torch.testing.assert_close(memory.gram[-1, :-1], total, rtol=1e-3, atol=1e-2)
        assert float(torch.linalg.eigvalsh(linear.within_class_covariance(memory))[0]) > -1e-5


@pytest.mark.parametrize("transport", ["linear", "neighbours", "none"])
def test_old_means_move_with_transport_only(fresh, transport):
    run = at(fresh("prolin", transport=transport, **ALL), 1)
    before = run.server.blocks["bank"]
    for r in range(3):
        run.play(1, r)
    after = run.server.blocks["bank"]
    observed = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    old = [y for y in before.labels if y not in observed]
    assert old
    one, two = (b.tensors["mean"][[b.labels.index(y) for y in old]] for b in (before, after))
    assert torch.allclose(one, two, atol=1e-5) == (transport == "none")
    assert bool(run.ledger.total(kind="transport")) == (transport != "none")


# -- the other ablations ------------------------------------------------------------------------------------------


def test_with_a_frozen_base_rounds_send_nothing_and_there_is_no_transport(tiny):
    run = tiny("prolin", base_rounds=0)
    assert {e.kind for e in run.ledger.entries if e.stage == "round"} <= {"header"}
    assert run.ledger.total(kind="transport") == 0


def test_the_base_stops_after_its_rounds(fresh):
    run = fresh("prolin", base_rounds=1)
    first = run.play(0, 0)
    second = run.play(0, 1)
    assert not same(first.blocks["base"], first.blocks["starting_base"])
    assert first.blocks["base"] is second.blocks["base"]


def test_the_head_can_be_solved_again_after_each_round(fresh):
    run = fresh("prolin", classifier="rounds", **ALL)
    first = run.play(0, 0)
    second = run.play(0, 1)
    assert not same(first.blocks["training_head"], second.blocks["training_head"])
    memory = summary_of_all(run, run.clients(0, 1), 0, second.blocks["base"])
    expected = 0.2 * linear.lda(memory, 0.3)[0]
    torch.testing.assert_close(
        second.blocks["training_head"].tensors["weight"].double(), expected, rtol=1e-2, atol=1e-3
    )
    assert not second.blocks["bank"].labels  # the memory changes only when the position closes


def test_a_free_head_starts_at_the_closed_form_and_is_trained(fresh):
    run = fresh("prolin", classifier="free", lr=0.0)
    untrained = run.play(0, 0)
    labels = list(run.server.blocks["training_head"].labels)
    head = untrained.blocks["head"].tensors["weight"]
    assert torch.equal(head[labels], untrained.blocks["training_head"].tensors["weight"])
    run = fresh("prolin", classifier="free")
    moving = run.play(0, 0)
    assert not torch.allclose(
        moving.blocks["head"].tensors["weight"][labels], moving.blocks["training_head"].tensors["weight"]
    )


@pytest.mark.parametrize("settings", [{}, {"base_rounds": 0}], ids=str)
def test_random_features_widen_the_memory_and_send_no_directions(tiny, fresh, settings):
    run = tiny("prolin", random_features=50, **settings)
    plain = tiny("prolin", **settings)
    width, narrow = (r.server.blocks["bank"].tensors["mean"].shape[1] for r in (run, plain))
    assert width == narrow + 50
    assert run.ledger.total(kind="model") == plain.ledger.total(kind="model")  # the directions are not sent
    assert run.ledger.total(kind="transport") == plain.ledger.total(kind="transport")
    z = run.method.views(run.server, lambda base: torch.randn(3, run.world.net.features))
    assert z.shape[1] == width
    assert bool((z[:, -50:] >= 0).all())
    with pytest.raises(ConfigError, match="random_features"):
        fresh("prolin", random_features=50, anchor=False)


@pytest.mark.parametrize("settings", [{}, PLAIN, {"base_rounds": 0}, {"anchor_every": 1, **ALL}], ids=str)
def test_statistics_of_a_sketch_are_exact(tiny, settings):
    """However the base moves, means and second moments are those of all reported examples."""
    run = tiny("prolin", sketch=30, **{**ALL, **settings})
    plain = tiny("prolin", **{**ALL, **settings})
    found = memory_of(run.server)
    width = plain.server.blocks["bank"].tensors["mean"].shape[1]
    assert found.mean.shape[1] == width + 30
    kinds = ("model", "transport")
    assert [run.ledger.total(kind=k) for k in kinds] == [plain.ledger.total(kind=k) for k in kinds]
    clients = [run.client(int(c), p, 0) for p in busy(run) for c in run.world.plan.active(p)]
    rows = [c.features(lambda net, inputs: net.sketch(inputs, 30)) for c in clients]
    true = linear.summarise(torch.cat(rows), torch.cat([c.y for c in clients]))
    assert found.labels == true.labels
    torch.testing.assert_close(found.mean[:, width:], true.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.gram[width:, width:], true.gram, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["sketch", "random_features"])
def test_too_many_random_features_are_an_error(fresh, name):
    with pytest.raises(ConfigError, match=f"{name} = 100000"):
        fresh("prolin", **{name: 100_000})


def test_the_deployed_head_shrinks_a_sketch_by_its_own_variance(tiny):
    run = tiny("prolin", base_rounds=0, sketch=30, **ALL)
    memory = memory_of(run.server)
    z = torch.randn(7, run.world.net.features + 30)
    found = run.method.scores(run.world.net, run.server, z)[:, list(memory.labels)]
    for last, equal in ((30, True), (0, False)):
        weight, bias = linear.lda(memory, 0.05, last)
        assert torch.allclose(found, z.double() @ weight.T + bias) == equal


def test_a_sketch_classifies_where_the_base_is_constant(fresh):
    """With a base whose weights are all zero, accuracy is at chance without a sketch and high with one."""
    without = fresh("prolin", base_rounds=0, **ALL)
    sketched = fresh("prolin", base_rounds=0, sketch=100, **ALL)
    for run in (without, sketched):
        zeros = {k: torch.zeros_like(t) for k, t in run.server.blocks["base"].tensors.items()}
        run.state.server = run.server.put(base=Block("model", zeros))
        run.stream()
    assert faa(without) < 25
    assert faa(sketched) > 75


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


def test_statistics_of_a_later_anchor_are_copied_and_then_measured_exactly(fresh):
    """A later anchor starts with the statistics of the base at that time; later statistics are measured under it."""
    run = at(fresh("prolin", anchor_every=1, **ALL), 1)
    d, plan = run.world.net.features, run.world.plan
    known = linear.select_features(memory_of(run.server), range(d))
    kept = run.server.blocks["base"]
    at(run, plan.positions, since=1)
    assert same(run.server.blocks["anchor/1"], kept)
    assert not same(run.server.blocks["base"], kept)
    since = [summary_of_all(run, map(int, plan.active(p)), p, kept) for p in busy(run) if p]
    true, found = linear.pool([known, *since]), memory_of(run.server)
    assert found.labels == true.labels
    torch.testing.assert_close(found.mean[:, 2 * d : 3 * d], true.mean, rtol=1e-3, atol=1e-4)  # after base and anchor
    rows = [*range(2 * d, 3 * d), found.mean.shape[1]]
    torch.testing.assert_close(found.gram[rows][:, rows], true.gram, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_anchors_are_added_at_the_chosen_positions(tiny, fresh, every, due):
    run = tiny("prolin", anchor_every=every, random_features=5, **ALL)
    d, kept = run.world.net.features, [f"anchor/{p}" for p in due if p in busy(run)]
    assert anchor_names(run.server.blocks) == ["anchor", *kept]
    assert run.server.blocks["bank"].tensors["mean"].shape[1] == d * (2 + len(kept)) + 5
    z = run.method.views(run.server, lambda base: torch.zeros(3, d) + base.version)
    assert z[0, : z.shape[1] - 5 : d].tolist() == [run.server.blocks[n].version for n in ("base", "anchor", *kept)]
    assert not every or run.state.client_bytes > tiny("prolin", **ALL).state.client_bytes
    with pytest.raises(ConfigError, match="anchor_every"):
        fresh("prolin", anchor_every=1, anchor=False)


def test_the_linear_map_reads_the_anchor_features(fresh):
    run = at(fresh("prolin", **ALL), 1)
    old = memory_of(run.server)
    start = run.server.blocks["base"]
    anchor = run.server.blocks["anchor"]
    final = [run.play(1, r) for r in range(3)][-1].blocks["base"]
    d = run.world.net.features
    pairs = [[current(run, c, 1, b)[0] for b in (start, anchor, final)] for c in run.clients(1, 2)]
    drift = linear.pool_drift([linear.measure_drift(torch.cat([u, a], 1), after) for u, a, after in pairs])
    moved = linear.apply_drift(old, *linear.fit_drift(drift, 0.1))
    found = memory_of(run.server)
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
        sent = run.method.survey(run.client(c, 0, 0), inbox).blocks
        enough = {y for y in clients[c].labels if int((clients[c].y == y).sum()) >= least}
        assert ("statistics" in sent) == bool(enough)
        assert not enough or set(sent["statistics"].labels) == enough
        sent = run.method.survey(run.client(c, 0, 0), {"base": inbox["base"], "starting_base": inbox["base"]}).blocks
        assert ("transport" in sent) == bool(enough)
        count = sent["transport"].tensors["old"][-1] if enough else 0.0  # the last entry of the matrix
        assert float(count) == sum(int((clients[c].y == y).sum()) for y in enough)
    silent = fresh("prolin", min_support=10_000, **ALL).stream()  # no client has as many
    assert silent.ledger.total(kind="statistics") == silent.ledger.total(kind="transport") == 0
    assert not silent.server.blocks["bank"].labels
    assert same(silent.server.blocks["base"], silent.trail[0][2].blocks["base"])


# -- costs and benefits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", [True, False])
def test_the_ledger_counts_the_matrices(fresh, anchor):
    run = at(fresh("prolin", anchor=anchor, **ALL), 1)
    d = run.world.net.features
    k = {}
    book = run.ledger
    w = 2 * d if anchor else d
    for c in run.clients(0, 0):
        k[c] = len(run.client(c, 0, 0).labels)
    for c in k:
        where = {"stage": "refresh", "position": 0, "client": c, "direction": "up"}
        statistics = 4 * (k[c] * (w + 1) + (w + 1) * (w + 2) // 2)
        assert book.total(kind="statistics", round=0, **where) == statistics  # all classes are new at first
        assert book.total(kind="statistics", round=2, **where) == statistics
        moves = 4 * ((w + 1) * (w + 2) // 2 + (w + 1) * d + d * (d + 1) // 2)
        assert book.total(kind="transport", round=2, **where) == moves
    once = run.server.blocks["base"].bytes * len(k) if anchor else 0  # the anchor, to each client
    assert book.total(kind="memory", position=0) == once  # neither bank nor matrix is broadcast


def test_the_starting_base_is_sent_once_a_position(fresh):
    run = at(fresh("prolin", **ALL), 1)
    base, c = run.server.blocks["base"].bytes, run.clients(0, 0)[0]
    book = {(e.stage, e.round): e.bytes for e in run.ledger.entries if e.client == c and e.kind == "model" and down(e)}
    head = 4 * len(run.server.blocks["bank"].labels) * (run.world.net.features + 1)
    assert book["refresh", 0] == base  # opening: the base
    assert book["round", 0] == head
    assert book["round", 1] == base  # the aggregated base; the client has the starting base already
    assert book["round", 2] == book["refresh", 2] == base


@pytest.mark.parametrize("transport", ["linear", "neighbours", "none"])
def test_a_starting_base_that_is_an_anchor_is_not_sent_twice(fresh, transport):
    run = at(fresh("prolin", distill=0.0, anchor_every=1, transport=transport, **ALL), 2)
    base, last = run.server.blocks["base"].bytes, run.world.config.train.rounds - 1
    assert "anchor/1" in run.server.blocks
    asked = {"stage": "refresh", "position": 1, "round": last, "direction": "down"}
    for c in run.clients(1, last):
        assert (
            run.ledger.total(kind="model", client=c, **asked) == base
        )  # the final base; the starting base is not sent again
        sent = run.ledger.total(kind="transport", client=c, **(asked | {"direction": "up"}))
        assert bool(sent) == (transport != "none")


def down(entry) -> bool:
    return entry.direction == "down" and entry.stage != "warmup" and entry.position == 0


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
