"""PRO-MAX with linear transport: the memory is carried by one linear map when the base is frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from profcil.engine import loop
from profcil.engine.channel import ServerState
from profcil.errors import ConfigError
from profcil.memory import linear, linear_drift
from profcil.memory.bank import measure
from profcil.methods.parts.linear_transport import carry_memory, fit_examples
from profcil.methods.parts.memory_blocks import bank_of
from profcil.methods.parts.shared_covariance import covariance_of
from profcil.methods.promax import ProMaxParams

FREEZE = 1  # the last of two rounds in which the base moves
ROUNDS = 4
LINEAR = {"transport": "linear", "setting": "homogeneous", "train__rounds": ROUNDS}
SHARED = {**LINEAR, "covariance": "shared", "noise": 1.0}


def after_first(fresh, **settings):
    """A run after its first position."""
    run = fresh("promax", **{**LINEAR, **settings})
    for r in range(ROUNDS):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, ROUNDS - 1))
    run.world.forget_features()
    return run


def features_of(run, position: int, base, clients=None) -> tuple[Tensor, Tensor]:
    """Features under a base and labels of clients at a position."""
    clients = run.clients(position, FREEZE) if clients is None else clients
    made = [run.client(c, position, FREEZE) for c in clients]
    return torch.cat([c.features(dict(base.tensors)) for c in made]), torch.cat([c.y for c in made])


def with_linear_drift(run) -> ServerState:
    """The server's state with another base, whose features are those of the present one, scaled and in another order.
    The last layer of the encoder is linear and rectified, so that this is exact."""
    base = dict(run.server.blocks["base"].tensors)
    d = run.world.net.features
    order = torch.randperm(d, generator=torch.Generator().manual_seed(0))
    scale = torch.linspace(0.5, 3.0, d)
    base["out.weight"] = scale[:, None] * base["out.weight"][order]
    base["out.bias"] = scale * base["out.bias"][order]
    return run.server.put_weights({"base": base})


def surveyed(run, state: ServerState, position: int) -> ServerState:
    """The state after the survey of the round in which the base is frozen."""
    when = run.when(position, FREEZE)
    inbox = {name: state.blocks[name] for name in run.method.survey_blocks(state, when) if name in state.blocks}
    clients = [run.client(c, position, FREEZE) for c in run.clients(position, FREEZE)]
    return run.method.absorb(state, [run.method.survey(client, inbox) for client in clients], when)


def error(means: Tensor, truth: Tensor) -> float:
    return float((means.double() - truth.double()).norm() / truth.double().norm())


# -- the mechanism ----------------------------------------------------------------------------------------------------


def test_a_linear_drift_is_followed_where_neighbours_and_stale_means_fail(fresh):
    run = after_first(fresh, ridge=1e-6)
    stale = bank_of(run.server.blocks["memory"])
    state = with_linear_drift(run)
    truth = measure(*features_of(run, 0, state.blocks["base"]))
    assert truth.labels == stale.labels
    before, y = features_of(run, 1, run.server.blocks["base"])
    assert not set(y.tolist()) & set(stale.labels)
    after, _ = features_of(run, 1, state.blocks["base"])
    shift, _ = run.method.shift_of(stale.mean, before, after)
    now = bank_of(surveyed(run, state, 1).blocks["memory"])
    carried = now.mean[[now.labels.index(y) for y in stale.labels]]
    assert error(carried, truth.mean) < 0.1
    assert error(carried, truth.mean) < 0.3 * error(stale.mean + shift, truth.mean)
    assert error(carried, truth.mean) < 0.3 * error(stale.mean, truth.mean)


def test_the_shared_covariance_follows_a_linear_drift(fresh):
    run = after_first(fresh, **SHARED, ridge=1e-6)
    stale = covariance_of(run.server.blocks["covariance"])
    state = with_linear_drift(run)
    u, y = features_of(run, 0, state.blocks["base"])
    centred = torch.cat([u[y == label] - u[y == label].mean(0) for label in y.unique()]).double()
    truth = centred.T @ centred / len(u)
    inbox = {name: state.blocks[name] for name in ("base", "starting_base")}
    clients = [run.client(c, 1, FREEZE) for c in run.clients(1, FREEZE)]
    replies = [run.method.survey(client, inbox) for client in clients]
    reports = [reply.blocks["drift"] for reply in replies]
    state = carry_memory(state, reports, run.method.params.ridge)
    carried = covariance_of(state.blocks["covariance"])
    assert carried.count == stale.count
    assert error(carried.matrix, truth) < 0.2
    assert error(carried.matrix, truth) < 0.3 * error(stale.matrix, truth)


@pytest.mark.parametrize("merge", ["replace", "counts"])
def test_the_map_is_the_closed_form_on_pooled_examples(fresh, merge):
    run = after_first(fresh, covariance="shared", merge=merge)
    start = run.server
    for r in range(FREEZE + 1):
        run.play(1, r)
    before, y = features_of(run, 1, start.blocks["base"])
    after, _ = features_of(run, 1, run.server.blocks["base"])
    assert float((after - before).abs().max()) > 1e-3
    u = linear.append_one(before)
    change = (after - before).double()
    penalty = 0.01 * (u.T @ u).diagonal().clamp(min=1e-9)  # a feature may be zero everywhere
    shift = torch.linalg.solve(u.T @ u + penalty.diag(), u.T @ change)
    old = bank_of(start.blocks["memory"])
    expected = old.mean.double() + linear.append_one(old.mean) @ shift
    now = bank_of(run.server.blocks["memory"])
    rows = [now.labels.index(label) for label in old.labels]
    assert not set(y.tolist()) & set(old.labels)
    torch.testing.assert_close(now.mean[rows].double(), expected, rtol=1e-3, atol=1e-4)


def test_the_memory_is_carried_once_a_position_before_frozen_rounds(tiny):
    run = tiny("promax", **LINEAR)
    before = run.before()
    moved = {}
    for what, when, server in run.trail:
        old = before.get((when.position, when.round))
        if what == "round" and when.position and not when.final:
            labels = old.blocks["memory"].labels
            means = [bank_of(s.blocks["memory"]) for s in (old, server)]
            kept = [bank.mean[[bank.labels.index(y) for y in labels]] for bank in means]
            moved.setdefault(when.round, []).append(not torch.equal(*kept))
            assert ("starting_base" in server.blocks) == (when.round < FREEZE)
    assert set(moved[0]) == {False}
    assert all(moved[FREEZE])
    assert set(moved[FREEZE + 1]) == {False}


def test_a_client_rehearses_from_means_moved_by_its_own_linear_map(fresh):
    run = after_first(fresh, noise=0.0)
    run.play(1, 0)
    client = run.client(run.clients(1, 1)[0], 1, 1)
    inbox = {name: run.server.blocks[name] for name in run.method.broadcast(run.server, client.when)}
    turn = run.method.turn(client, inbox)
    fitted = {b: {k: t + 0.05 for k, t in tensors.items()} for b, tensors in next(turn).weights.items()}
    rehearsed = turn.send(type("Trained", (), {"weights": fitted, "loss": 0.0, "steps": 1})).source
    start = client.features(inbox["starting_base"])
    shift, _ = fit_examples(start, client.features(fitted["base"]), 0.01)
    expected = linear_drift.carried_means(inbox["memory"].tensors["mean"], shift)
    torch.testing.assert_close(rehearsed.mean.double(), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(rehearsed.mean, inbox["memory"].tensors["mean"], atol=1e-2)


def test_in_frozen_rounds_a_client_rehearses_from_the_memory_as_it_is(fresh):
    run = after_first(fresh, noise=0.0, fit_when_frozen=False)
    for r in range(FREEZE + 1):
        run.play(1, r)
    client = run.client(run.clients(1, FREEZE + 1)[0], 1, FREEZE + 1)
    inbox = {name: run.server.blocks[name] for name in run.method.broadcast(run.server, client.when)}
    assert "starting_base" not in inbox
    source = next(run.method.turn(client, inbox)).source
    old = [i for i, y in enumerate(inbox["memory"].labels) if y not in client.labels]
    assert torch.equal(source.mean, inbox["memory"].tensors["mean"][old])


# -- other settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh_at", ["final", "freeze", "both"])
@pytest.mark.parametrize("refresh", ["global", "local"])
def test_old_means_are_carried_whenever_the_memory_is_refreshed(fresh, refresh_at, refresh):
    run = after_first(fresh, refresh_at=refresh_at, refresh=refresh)
    old = bank_of(run.server.blocks["memory"])
    for r in range(ROUNDS):
        run.play(1, r)
    end = run.method.end_position(run.server, run.when(1, ROUNDS - 1))
    now = bank_of(end.blocks["memory"])
    kept = now.mean[[now.labels.index(y) for y in old.labels]]
    truth = measure(*features_of(run, 0, end.blocks["base"]))
    assert set(now.labels) > set(old.labels)
    assert error(kept, truth.mean) < error(old.mean, truth.mean)


def test_if_nobody_reports_when_the_base_is_frozen_the_last_refresh_carries_the_memory(fresh, monkeypatch):
    usual = loop.participants
    monkeypatch.setattr(loop, "participants", lambda p, *at: () if at == (1, FREEZE) else usual(p, *at))
    run = fresh("promax", **LINEAR).stream()
    first = run.after_positions()[0]
    states = [s for what, w, s in run.trail if (what, w.position) == ("round", 1)]
    labels = first.blocks["memory"].labels
    means = [bank_of(s.blocks["memory"]) for s in (first, *states)]
    kept = [bank.mean[[bank.labels.index(y) for y in labels]] for bank in means]
    assert [torch.equal(kept[0], mean) for mean in kept[1:]] == [True, True, True, False]


def test_with_a_frozen_base_nothing_is_sent_and_the_result_is_that_of_pro(tiny, same_bits):
    linear_run = tiny("promax", base_rounds=0, transport="linear", refresh_at="final")
    pro = tiny("pro", base_rounds=0, refresh_at="final")
    weights = [run.server.drop("starting_base") for run in (linear_run, pro)]
    assert same_bits(*weights)
    assert linear_run.ledger.entries == pro.ledger.entries


def test_with_learning_rate_zero_means_do_not_move(tiny):
    run = tiny("promax", lr=0.0, **LINEAR)
    first, *_, last = run.after_positions()
    old = bank_of(first.blocks["memory"])
    now = bank_of(last.blocks["memory"])
    kept = now.mean[[now.labels.index(y) for y in old.labels]]
    torch.testing.assert_close(kept, old.mean, rtol=1e-5, atol=1e-5)


def test_the_ledger_counts_the_sums(tiny):
    run = tiny("promax", **LINEAR)
    width = 2 * run.world.net.features + 1
    expected = 0
    for position in range(1, run.world.plan.positions):
        for c in run.clients(position, FREEZE):
            rows = min(width, len(run.world.plan.samples(c, position)))
            expected += 4 * (rows * width - rows * (rows - 1) // 2)
    assert expected > 0
    assert run.ledger.total(direction="up", kind="transport") == expected
    assert run.ledger.total(direction="down", kind="transport") == 0


def test_adapted_memory_is_refused():
    for more in ({"adapted_bank": True}, {"old_memory": "adapted"}):
        with pytest.raises(ConfigError, match="base features"):
            ProMaxParams(transport="linear", **more)


def test_no_memory_means_nothing_to_carry(tiny):
    run = tiny("promax", old_memory="none", **LINEAR)
    assert "starting_base" not in run.server.blocks
    assert run.ledger.total(kind="transport") == 0


@pytest.mark.parametrize("settings", [{}, {"keep_scores": 1.0, "closed_head": True}], ids=["plain", "all options"])
def test_reference_and_default_path_agree(fresh, max_difference, settings):
    runs = [fresh("promax", accelerate=way, **SHARED, **settings) for way in ("off", "auto")]
    for run in runs:
        for position in (0, 1):
            for r in range(ROUNDS):
                run.play(position, r)
            run.state.server = run.method.end_position(run.server, run.when(position, ROUNDS - 1))
            run.world.forget_features()
    assert max_difference(*(run.server for run in runs)) < 1e-2
