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
PLAIN = {**ALL, "anchor": False}  # and the memory is of the moving features alone
FEW = {"setting": "homogeneous", "participants": 2}  # of four clients, all of which have data


def current(run, client: int, position: int, base) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of what a client holds at a position, under some base."""
    made = run.client(client, position, 0)
    return made.features(dict(base.tensors)), made.y


def summary_of_all(run, clients, position: int, base) -> linear.Summary:
    return linear.pool([linear.summarise(*current(run, c, position, base)) for c in clients])


def busy(run) -> list[int]:
    return [p for p in range(run.world.plan.positions) if len(run.world.plan.active(p))]


def at(run, position: int, since: int = 0):
    """A run that has been played up to a position."""
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
def test_a_position_opens_when_someone_is_there_and_ends_though_nobody_is(fresh, monkeypatch, empty):
    there = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at == (1, empty) else there(p, *at))
    run = fresh("prolin", train__rounds=3, **ALL).stream()
    before, after = run.after_positions()[:2]
    assert before.blocks.keys() == after.blocks.keys()
    assert not same(before.blocks["base"], after.blocks["base"])  # it has moved
    new = {y for c in run.world.plan.active(1) for y in run.world.plan.observed(int(c), 1)}
    assert new - set(before.blocks["bank"].labels) and new <= set(after.blocks["bank"].labels)


# -- the closed form ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["lda", "ridge"])
def test_on_a_frozen_base_the_federation_solves_what_one_machine_would(tiny, form):
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
    before, clients = run.server, run.clients(1, 0)
    held = before.blocks["bank"].labels
    after = run.play(1, 0)
    fresh_ones = [current(run, c, 1, before.blocks["base"]) for c in clients]
    new = [(u[keep], y[keep]) for u, y in fresh_ones for keep in [~torch.isin(y, torch.tensor(held))]]
    held_still = linear.select_features(memory_of(before), range(run.world.net.features))
    memory = linear.pool([held_still, *(linear.summarise(u, y) for u, y in new if len(y))])
    assert set(held) < set(memory.labels) == set(after.blocks["training_head"].labels)
    weight, bias = linear.lda(memory, 0.3)
    torch.testing.assert_close(
        after.blocks["training_head"].tensors["weight"].double(), 0.2 * weight, rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(after.blocks["training_head"].tensors["bias"].double(), 0.2 * bias, rtol=1e-3, atol=1e-4)


def test_rounds_move_the_base_only_and_leave_the_head(fresh):
    run = fresh("prolin", **ALL)
    start, first, second = run.server, run.play(0, 0), run.play(0, 1)
    assert not same(start.blocks["base"], first.blocks["base"])
    assert not same(first.blocks["base"], second.blocks["base"])
    assert first.blocks["training_head"] is second.blocks["training_head"]
    assert same(first.blocks["starting_base"], start.blocks["base"])
    assert all(start.blocks[b] is second.blocks[b] for b in ("adapter", "head", "bank", "gram"))


@pytest.mark.parametrize("base_rounds", [-1, 1])
def test_the_base_steps_back_by_the_share_of_what_is_remembered(fresh, base_rounds):
    runs = [at(fresh("prolin", inertia=w, base_rounds=base_rounds, **ALL), 1) for w in (0.0, 2.0)]
    start, rounds = runs[0].server.blocks["base"], runs[0].world.config.train.rounds
    assert same(start, runs[1].server.blocks["base"])  # nothing was remembered yet
    old = float(runs[0].server.blocks["bank"].tensors["count"].sum())
    new = sum(len(runs[0].client(c, 1, 0).y) for c in runs[0].clients(1, 0))
    free, held = ([run.play(1, r) for r in range(rounds)][-1].blocks["base"].tensors for run in runs)
    assert old and new
    for k, t in start.tensors.items():
        torch.testing.assert_close(held[k], t + (free[k] - t) * new / (new + 2 * old))
    assert any(not torch.equal(free[k], held[k]) for k in free)


def test_what_weighs_is_who_moved_the_base_not_who_was_heard_afterwards(fresh):
    run, weights = fresh("prolin", inertia=1.0, base_rounds=1, **FEW), []
    for p in range(3):
        weights.append(sum(len(run.client(c, p, 0).y) for c in run.clients(p, 0)))
        at(run, p + 1, since=p)
        assert int(run.server.blocks["past_samples"].tensors["samples"]) == sum(weights)
    assert float(run.server.blocks["bank"].tensors["count"].sum()) > sum(weights)


def test_the_base_steps_back_when_nobody_is_there_in_the_last_round(fresh):
    run = at(fresh("prolin", inertia=2.0, **ALL), 1)
    start, rounds = run.server.blocks["base"].tensors, run.world.config.train.rounds
    came = [run.play(1, r) for r in range(rounds - 1)][-1]
    old = float(came.blocks["bank"].tensors["count"].sum())
    new = sum(len(run.client(c, 1, 0).y) for c in run.clients(1, 0))
    held = run.method.aggregate(came, [], When("round", 1, rounds - 1, rounds)).blocks
    for k, t in start.items():
        free = came.blocks["base"].tensors[k]
        torch.testing.assert_close(held["base"].tensors[k], t + (free - t) * new / (new + 2 * old))
    assert "position_samples" not in held


@pytest.mark.parametrize("inertia", [0.0, 1.0])
def test_what_lives_for_a_position_ends_with_it(fresh, inertia):
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


def test_the_base_is_drawn_towards_its_starting_features(fresh):
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
    """How far current features have come from where the position started."""
    run = fresh("prolin", setting="homogeneous", model__norm="group", train__lr=0.01, **ALL, **settings)
    start = run.server.blocks["base"]
    for r in range(2):
        run.play(0, r)
    pairs = [
        (current(run, c, 0, start)[0], current(run, c, 0, run.server.blocks["base"])[0]) for c in run.clients(0, 0)
    ]
    return sum(float((a - b).square().sum()) for a, b in pairs)


def test_examples_of_classes_without_statistics_wait(fresh):
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


# -- the memory follows -------------------------------------------------------------------------------------------


def test_a_position_closes_with_the_old_memory_carried_and_fresh_statistics_added(fresh):
    run = at(fresh("prolin", **PLAIN), 1)
    old, start = memory_of(run.server), run.server.blocks["base"]
    after = [run.play(1, r) for r in range(3)][-1]
    clients, final = run.clients(1, 2), after.blocks["base"]
    drift = [linear.measure_drift(current(run, c, 1, start)[0], current(run, c, 1, final)[0]) for c in clients]
    carried = linear.apply_drift(old, *linear.fit_drift(linear.pool_drift(drift), 0.1))
    expected, found = linear.pool([carried, summary_of_all(run, clients, 1, final)]), memory_of(after)
    assert not torch.allclose(carried.mean, old.mean, atol=1e-3)
    assert found.labels == expected.labels
    assert torch.equal(found.count, expected.count)
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.gram, expected.gram, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("settings", [{}, {"classifier": "rounds"}, {"train__rounds": 1}], ids=str)
def test_nobodys_examples_count_twice_when_few_take_part(fresh, settings):
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
def test_whoever_takes_part_once_the_base_has_settled_is_heard_and_nobody_twice(fresh, base_rounds):
    run = fresh("prolin", base_rounds=base_rounds, sketch=10, train__rounds=4, **FEW)
    settled = range(max(0, base_rounds - 1), 4)
    heard = sorted({c for r in settled for c in run.clients(0, r)})
    assert len(heard) > 2  # more than any one round has
    for r in range(4):
        run.play(0, r)
    up = {"stage": "refresh", "position": 0, "direction": "up", "kind": "statistics"}
    for c in heard:
        sent = [r for r in range(4) if run.ledger.total(client=c, round=r, **up)]
        first = min(r for r in settled if c in run.clients(0, r))
        opened = base_rounds and c in run.clients(0, 0)
        assert sent == sorted({*([0] if opened else []), first})
    told, found = summary_of_all(run, heard, 0, run.server.blocks["base"]), memory_of(run.server)
    assert found.labels == told.labels
    assert torch.equal(found.count, told.count)
    d = run.world.net.features
    torch.testing.assert_close(found.mean[:, :d], told.mean, rtol=1e-3, atol=1e-4)
    rows = [*range(d), found.mean.shape[1]]
    torch.testing.assert_close(found.gram[rows][:, rows], told.gram, rtol=1e-3, atol=1e-2)
    assert not {"reported_clients", "reported_statistics", "reported_drift"} & run.server.blocks.keys()


def test_what_was_heard_is_not_lost_when_nobody_is_there_in_the_last_round(fresh, monkeypatch):
    there = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at[1] == 2 else there(p, *at))
    run = fresh("prolin", base_rounds=0, **FEW).stream()
    position = max(p for p in busy(run))
    counts = [
        sum(len(run.client(c, p, 0).y) for c in {*there(run.world.plan, p, 0), *there(run.world.plan, p, 1)})
        for p in range(position + 1)
    ]
    assert float(memory_of(run.server).count.sum()) == sum(counts)


@pytest.mark.parametrize("transport", ["linear", "neighbours"])
def test_the_drift_is_that_of_everyone_who_was_heard(fresh, transport):
    """Two rounds of two give what one round of four would."""
    run = at(fresh("prolin", transport=transport, **{**ALL, "setting": "homogeneous"}), 1)
    for r in range(2):
        run.play(1, r)
    inbox, clients = dict(run.server.blocks), run.clients(1, 1)
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


def test_a_memory_on_a_real_stream_stays_consistent(tiny):
    for server in tiny("prolin").after_positions():
        memory = memory_of(server)
        if not memory.labels:
            continue
        assert float(memory.gram[-1, -1]) == float(memory.count.sum())
        total = (memory.count[:, None] * memory.mean).sum(0)
        torch.testing.assert_close(memory.gram[-1, :-1], total, rtol=1e-3, atol=1e-2)
        assert float(torch.linalg.eigvalsh(linear.within_class_covariance(memory))[0]) > -1e-5


@pytest.mark.parametrize("transport", ["linear", "neighbours", "none"])
def test_old_means_move_only_where_there_is_transport(fresh, transport):
    run = at(fresh("prolin", transport=transport, **ALL), 1)
    before = run.server.blocks["bank"]
    for r in range(3):
        run.play(1, r)
    after = run.server.blocks["bank"]
    here = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    old = [y for y in before.labels if y not in here]
    assert old
    one, two = (b.tensors["mean"][[b.labels.index(y) for y in old]] for b in (before, after))
    assert torch.allclose(one, two, atol=1e-5) == (transport == "none")
    assert bool(run.ledger.total(kind="transport")) == (transport != "none")


# -- the other ablations ------------------------------------------------------------------------------------------


def test_a_frozen_base_needs_no_rounds_and_no_transport(tiny):
    run = tiny("prolin", base_rounds=0)
    assert {e.kind for e in run.ledger.entries if e.stage == "round"} <= {"header"}
    assert run.ledger.total(kind="transport") == 0


def test_the_base_stops_after_its_rounds(fresh):
    run = fresh("prolin", base_rounds=1)
    first, second = run.play(0, 0), run.play(0, 1)
    assert not same(first.blocks["base"], first.blocks["starting_base"])
    assert first.blocks["base"] is second.blocks["base"]


def test_the_head_can_be_solved_anew_after_each_round(fresh):
    run = fresh("prolin", classifier="rounds", **ALL)
    first, second = run.play(0, 0), run.play(0, 1)
    assert not same(first.blocks["training_head"], second.blocks["training_head"])
    memory = summary_of_all(run, run.clients(0, 1), 0, second.blocks["base"])
    expected = 0.2 * linear.lda(memory, 0.3)[0]
    torch.testing.assert_close(
        second.blocks["training_head"].tensors["weight"].double(), expected, rtol=1e-2, atol=1e-3
    )
    assert not second.blocks["bank"].labels  # nothing is committed before the position closes


def test_a_free_head_starts_at_the_closed_form_and_is_trained(fresh):
    run = fresh("prolin", classifier="free", lr=0.0)
    still, labels = run.play(0, 0), list(run.server.blocks["training_head"].labels)
    assert torch.equal(still.blocks["head"].tensors["weight"][labels], still.blocks["training_head"].tensors["weight"])
    run = fresh("prolin", classifier="free")
    moving = run.play(0, 0)
    assert not torch.allclose(
        moving.blocks["head"].tensors["weight"][labels], moving.blocks["training_head"].tensors["weight"]
    )


@pytest.mark.parametrize("settings", [{}, {"base_rounds": 0}], ids=str)
def test_random_features_widen_what_never_moves(tiny, fresh, settings):
    run, plain = tiny("prolin", random_features=50, **settings), tiny("prolin", **settings)
    width, narrow = (r.server.blocks["bank"].tensors["mean"].shape[1] for r in (run, plain))
    assert width == narrow + 50
    assert run.ledger.total(kind="model") == plain.ledger.total(kind="model")  # the directions stay home
    assert run.ledger.total(kind="transport") == plain.ledger.total(kind="transport")
    z = run.method.views(run.server, lambda base: torch.randn(3, run.world.net.features))
    assert z.shape[1] == width
    assert bool((z[:, -50:] >= 0).all())
    with pytest.raises(ConfigError, match="random_features"):
        fresh("prolin", random_features=50, anchor=False)


@pytest.mark.parametrize("settings", [{}, PLAIN, {"base_rounds": 0}, {"anchor_every": 1, **ALL}], ids=str)
def test_what_is_remembered_of_a_sketch_is_exact(tiny, settings):
    """Whatever the base does: means and second moments are those of everything that was told."""
    run, plain = tiny("prolin", sketch=30, **{**ALL, **settings}), tiny("prolin", **{**ALL, **settings})
    found, width = memory_of(run.server), plain.server.blocks["bank"].tensors["mean"].shape[1]
    assert found.mean.shape[1] == width + 30
    kinds = ("model", "transport")
    assert [run.ledger.total(kind=k) for k in kinds] == [plain.ledger.total(kind=k) for k in kinds]
    told = [run.client(int(c), p, 0) for p in busy(run) for c in run.world.plan.active(p)]
    rows = [c.features(lambda net, inputs: net.sketch(inputs, 30)) for c in told]
    true = linear.summarise(torch.cat(rows), torch.cat([c.y for c in told]))
    assert found.labels == true.labels
    torch.testing.assert_close(found.mean[:, width:], true.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.gram[width:, width:], true.gram, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["sketch", "random_features"])
def test_more_random_features_than_moments_have_room_for_are_a_slip_of_the_pen(fresh, name):
    with pytest.raises(ConfigError, match=f"{name} = 100000"):
        fresh("prolin", **{name: 100_000})


def test_the_deployed_head_shrinks_a_sketch_by_its_own_variance(tiny):
    run = tiny("prolin", base_rounds=0, sketch=30, **ALL)
    memory, z = memory_of(run.server), torch.randn(7, run.world.net.features + 30)
    found = run.method.scores(run.world.net, run.server, z)[:, list(memory.labels)]
    for apart, alike in ((30, True), (0, False)):
        weight, bias = linear.lda(memory, 0.05, apart)
        assert torch.allclose(found, z.double() @ weight.T + bias) == alike


def test_a_sketch_tells_what_the_base_does_not(fresh):
    """A base that maps everything to nothing leaves the federation guessing; a sketch beside it does not."""
    blind, seeing = (fresh("prolin", base_rounds=0, sketch=width, **ALL) for width in (0, 100))
    for run in (blind, seeing):
        nothing = {k: torch.zeros_like(t) for k, t in run.server.blocks["base"].tensors.items()}
        run.state.server = run.server.put(base=Block("model", nothing))
        run.stream()
    assert faa(blind) < 25
    assert faa(seeing) > 75


def test_what_is_remembered_of_the_anchor_is_exact(tiny):
    """Whatever the base does: old classes' means of warmed features are the true ones, those of moving ones are not."""
    run = tiny("prolin", **ALL)
    plan, d, bank = run.world.plan, run.world.net.features, run.server.blocks["bank"]
    for half, base in enumerate(("base", "anchor")):
        rows = [current(run, int(c), p, run.server.blocks[base]) for p in busy(run) for c in plan.active(p)]
        true = linear.summarise(*(torch.cat(column) for column in zip(*rows, strict=True)))
        found = bank.tensors["mean"][:, half * d : (half + 1) * d]
        assert bank.labels == true.labels
        assert torch.allclose(found.double(), true.mean, atol=1e-4) == (base == "anchor")


def test_what_is_known_of_a_kept_base_stays_however_the_present_one_moves(fresh):
    """A later anchor takes over what was known of the base when it was kept, and from then on is measured exactly."""
    run = at(fresh("prolin", anchor_every=1, **ALL), 1)
    d, plan = run.world.net.features, run.world.plan
    known, kept = linear.select_features(memory_of(run.server), range(d)), run.server.blocks["base"]
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
def test_bases_are_kept_where_it_is_due(tiny, fresh, every, due):
    run = tiny("prolin", anchor_every=every, random_features=5, **ALL)
    d, kept = run.world.net.features, [f"anchor/{p}" for p in due if p in busy(run)]
    assert anchor_names(run.server.blocks) == ["anchor", *kept]
    assert run.server.blocks["bank"].tensors["mean"].shape[1] == d * (2 + len(kept)) + 5
    z = run.method.views(run.server, lambda base: torch.zeros(3, d) + base.version)
    assert z[0, : z.shape[1] - 5 : d].tolist() == [run.server.blocks[n].version for n in ("base", "anchor", *kept)]
    assert not every or run.state.client_bytes > tiny("prolin", **ALL).state.client_bytes
    with pytest.raises(ConfigError, match="anchor_every"):
        fresh("prolin", anchor_every=1, anchor=False)


def test_the_map_reads_the_anchor_too(fresh):
    run = at(fresh("prolin", **ALL), 1)
    old, start, anchor = memory_of(run.server), run.server.blocks["base"], run.server.blocks["anchor"]
    final, d = [run.play(1, r) for r in range(3)][-1].blocks["base"], run.world.net.features
    pairs = [[current(run, c, 1, b)[0] for b in (start, anchor, final)] for c in run.clients(1, 2)]
    drift = linear.pool_drift([linear.measure_drift(torch.cat([u, a], 1), after) for u, a, after in pairs])
    carried, found = linear.apply_drift(old, *linear.fit_drift(drift, 0.1)), memory_of(run.server)
    here = {int(y) for c in run.clients(1, 0) for y in run.client(c, 1, 0).labels}
    kept = [y for y in old.labels if y not in here]
    one, two = (s.mean[[s.labels.index(y) for y in kept]] for s in (carried, found))
    assert kept
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)
    assert torch.allclose(one[:, d:], old.mean[[old.labels.index(y) for y in kept]][:, d:])


def test_statistics_of_few_examples_stay_with_the_client(fresh):
    run = fresh("prolin", **PLAIN)
    clients = {c: run.client(c, 0, 0) for c in run.clients(0, 0)}
    counts = [int((c.y == y).sum()) for c in clients.values() for y in c.labels]
    least = max(counts)
    shy = fresh("prolin", min_support=least, **PLAIN)
    inbox = {n: shy.server.blocks[n] for n in ("base", "known_classes")}
    for c in clients:
        told = shy.method.survey(shy.client(c, 0, 0), inbox).blocks
        enough = {y for y in clients[c].labels if int((clients[c].y == y).sum()) >= least}
        assert ("statistics" in told) == bool(enough)
        assert not enough or set(told["statistics"].labels) == enough
        told = shy.method.survey(shy.client(c, 0, 0), {"base": inbox["base"], "starting_base": inbox["base"]}).blocks
        assert ("transport" in told) == bool(enough)
        held = told["transport"].tensors["old"][-1] if enough else 0.0  # the count, at the matrix's last corner
        assert float(held) == sum(int((clients[c].y == y).sum()) for y in enough)
    silent = fresh("prolin", min_support=10_000, **ALL).stream()  # nobody ever has as many
    assert silent.ledger.total(kind="statistics") == silent.ledger.total(kind="transport") == 0
    assert not silent.server.blocks["bank"].labels
    assert same(silent.server.blocks["base"], silent.trail[0][2].blocks["base"])


# -- what it costs, and what it brings ----------------------------------------------------------------------------


@pytest.mark.parametrize("anchor", [True, False])
def test_the_ledger_counts_the_matrices(fresh, anchor):
    run = at(fresh("prolin", anchor=anchor, **ALL), 1)
    d, k, book = run.world.net.features, {}, run.ledger
    w = 2 * d if anchor else d
    for c in run.clients(0, 0):
        k[c] = len(run.client(c, 0, 0).labels)
    for c in k:
        where = {"stage": "refresh", "position": 0, "client": c, "direction": "up"}
        told = 4 * (k[c] * (w + 1) + (w + 1) * (w + 2) // 2)
        assert book.total(kind="statistics", round=0, **where) == told  # all classes are new at the first position
        assert book.total(kind="statistics", round=2, **where) == told
        moves = 4 * ((w + 1) * (w + 2) // 2 + (w + 1) * d + d * (d + 1) // 2)
        assert book.total(kind="transport", round=2, **where) == moves
    once = run.server.blocks["base"].bytes * len(k) if anchor else 0  # the anchor, to each client
    assert book.total(kind="memory", position=0) == once  # neither bank nor matrix ever goes down


def test_the_starting_base_is_sent_once_a_position(fresh):
    run = at(fresh("prolin", **ALL), 1)
    base, c = run.server.blocks["base"].bytes, run.clients(0, 0)[0]
    book = {(e.stage, e.round): e.bytes for e in run.ledger.entries if e.client == c and e.kind == "model" and down(e)}
    head = 4 * len(run.server.blocks["bank"].labels) * (run.world.net.features + 1)
    assert book["refresh", 0] == base  # opening: the base itself
    assert book["round", 0] == head
    assert book["round", 1] == base  # the moved one; where it started is what it holds
    assert book["round", 2] == book["refresh", 2] == base


@pytest.mark.parametrize("transport", ["linear", "neighbours", "none"])
def test_a_starting_base_that_is_kept_is_not_sent_by_another_name(fresh, transport):
    run = at(fresh("prolin", distill=0.0, anchor_every=1, transport=transport, **ALL), 2)
    base, last = run.server.blocks["base"].bytes, run.world.config.train.rounds - 1
    assert "anchor/1" in run.server.blocks
    asked = {"stage": "refresh", "position": 1, "round": last, "direction": "down"}
    for c in run.clients(1, last):
        assert run.ledger.total(kind="model", client=c, **asked) == base  # where it came to; no start beside it
        told = run.ledger.total(kind="transport", client=c, **(asked | {"direction": "up"}))
        assert bool(told) == (transport != "none")


def down(entry) -> bool:
    return entry.direction == "down" and entry.stage != "warmup" and entry.position == 0


def test_the_server_takes_no_gradient(fresh, monkeypatch):
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


def test_only_who_asks_for_it_opens_a_position(tiny):
    assert not any(e.stage == "refresh" for e in tiny("fedavg").ledger.entries)
    assert not any(e.stage == "refresh" and e.round == 0 for e in tiny("pro").ledger.entries)


def test_it_remembers_what_fedavg_forgets(tiny):
    same_for_both = {"train__rounds": 4, "train__lr": 0.01}
    assert faa(tiny("prolin", **same_for_both)) > faa(tiny("fedavg", **same_for_both)) + 20


def test_its_means_are_examined(tiny):
    run = tiny("prolin")
    memory, project = run.method.memories(run.world.net, run.server)["memory"]
    assert memory.tensors["mean"].shape == (len(memory.labels), run.world.net.features)
    d = run.world.net.features
    assert torch.equal(project(torch.arange(2 * d)[None]), torch.arange(d)[None])  # the anchor would flatter it
