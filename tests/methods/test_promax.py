"""PRO-MAX: the memory follows the representation while it moves, and only then."""

from __future__ import annotations

import pytest
import torch

from profcil.memory.transport import combine
from profcil.methods.pro import bank_of
from profcil.methods.promax import calibration_subset

BANKS = ("memory", "adapted")


def moves(run) -> list[tuple[bool, bool, bool]]:
    """For every round with participants and a memory, before the last: (base moves, means moved, rest untouched)."""
    before, found = run.before(), []
    for what, when, server in run.trail:
        if what != "round" or when.final or not run.clients(when.position, when.round):
            continue
        old, new = before[when.position, when.round].blocks["memory"], server.blocks["memory"]
        if old.labels:
            moved = not torch.equal(old.tensors["mean"], new.tensors["mean"])
            rest = all(torch.equal(old.tensors[k], new.tensors[k]) for k in ("spread", "count"))
            found.append((when.round < 2, moved, rest))
    assert {plastic for plastic, _, _ in found} == {True, False}
    return found


def test_promax_moves_the_means_exactly_while_the_base_moves(tiny):
    assert all(moved == plastic and rest for plastic, moved, rest in moves(tiny("promax", train__rounds=4)))


def test_pro_leaves_the_memory_alone(tiny):
    assert not any(moved for _, moved, _ in moves(tiny("pro", train__rounds=4)))


def test_without_learning_there_is_no_drift(tiny):
    assert not any(moved for _, moved, _ in moves(tiny("promax", train__rounds=4, lr=0.0)))


def test_with_a_frozen_base_promax_is_pro_to_the_bit(tiny, same_bits):
    assert same_bits(tiny("promax", base_rounds=0).server, tiny("pro", base_rounds=0).server)
    assert tiny("promax", base_rounds=0).ledger.total(kind="transport") == 0


def ready(fresh, **settings):
    run = fresh("promax", **settings)
    for r in range(3):
        run.play(0, r)
    return run


def test_the_server_applies_the_confidence_weighted_mean_of_the_moves(fresh):
    run = ready(fresh)
    told = [r.blocks["memory_transport"].tensors for r in run.turns(1, 0)]
    assert len(told) > 1
    old = run.server.blocks["memory"].tensors["mean"]
    shift = combine([t["shift"] for t in told], [t["confidence"] for t in told])
    assert float(shift.abs().max()) > 0
    torch.testing.assert_close(run.play(1, 0).blocks["memory"].tensors["mean"], old + shift)


def test_a_client_rehearses_from_the_moved_means(fresh):
    run = ready(fresh, noise=0.0)
    client = run.client(run.clients(1, 0)[0], 1, 0)
    turn = run.method.turn(client, dict(run.server.blocks))
    fit = next(turn)
    shaken = {b: {k: t + 0.1 for k, t in fit.weights[b].items()} for b in fit.weights}
    rehearse = turn.send(type("Trained", (), {"weights": shaken, "loss": 0.0, "steps": 1}))
    labels = run.server.blocks["memory"].labels
    old = [i for i, y in enumerate(labels) if y not in client.labels]
    assert old
    assert rehearse.source.bank_rows.tolist() == old
    assert not torch.allclose(rehearse.source.mean, run.server.blocks["memory"].tensors["mean"][old])


@pytest.mark.parametrize("setting", [{"neighbours": 1}, {"bandwidth": 0.1}, {"tau": 3.0}, {"calibration": 4}], ids=str)
def test_every_setting_of_the_transport_has_an_effect(fresh, setting):
    usual, other = (ready(fresh, **s).turns(1, 0)[0].blocks["memory_transport"].tensors for s in ({}, setting))
    assert not torch.equal(usual["confidence"], other["confidence"])


def test_adapted_memory_is_moved_too_and_keeps_its_length(fresh):
    run = ready(fresh, adapted_bank=True)
    old = run.server.blocks["adapted"].tensors
    new = run.play(1, 0).blocks["adapted"].tensors
    assert not torch.equal(old["mean"], new["mean"])
    torch.testing.assert_close(old["mean"].norm(dim=1), new["mean"].norm(dim=1))
    assert torch.equal(old["spread"], new["spread"])


# -- transport under the aggregated model -----------------------------------------------------------------------------


def test_global_transport_is_the_drift_of_the_aggregated_model(fresh):
    """Measured by hand: from the broadcast base to the new one, on the participants' calibration examples."""
    run = fresh("promax", transport="global", setting="homogeneous")
    for round in range(3):
        run.play(0, round)
    before, after = run.server, run.play(1, 0)
    bank, moves = bank_of(before.blocks["memory"]), []
    for c in run.clients(1, 0):
        client = run.client(c, 1, 0)
        index = calibration_subset(client, run.method.params.calibration)
        old, new = (client.features(s.blocks["base"].tensors, index) for s in (before, after))
        moves.append(run.method.shift_of(bank.mean, old, new))
    shift = combine([m[0] for m in moves], [m[1] for m in moves])
    assert len(bank) and shift.abs().max() > 0
    assert torch.allclose(after.blocks["memory"].tensors["mean"], bank.mean + shift, atol=1e-6)


@pytest.mark.parametrize("adapted", ["true", "false"])
def test_global_transport_moves_only_while_the_base_moves_and_costs_no_second_base(tiny, adapted):
    run = tiny("promax", train__rounds=4, transport="global", adapted_bank=adapted)
    assert all(moved == plastic and rest for plastic, moved, rest in moves(run))
    local = tiny("promax", train__rounds=4, adapted_bank=adapted)
    assert run.ledger.total(kind="transport", stage="round") == 0
    assert run.ledger.total(kind="transport", stage="refresh") == local.ledger.total(kind="transport")


@pytest.mark.parametrize("transport", ["local", "global"])
@pytest.mark.parametrize("fits", ["true", "false"])
def test_adapted_memory_follows_the_fitting_phase_of_frozen_rounds(tiny, fits, transport):
    """Where the adapter moves and the base does not; rehearsal from adapted memory moves neither."""
    more = {"old_memory": "adapted", "fit_when_frozen": fits, "transport": transport}
    run, found = tiny("promax", train__rounds=4, **more), []
    for (position, round), server in run.before().items():
        after = next(s for what, w, s in run.trail if (what, w.position, w.round) == ("round", position, round))
        if round == 2 and server.blocks["adapted"].labels and run.clients(position, round):
            found += [torch.equal(server.blocks[n].tensors["mean"], after.blocks[n].tensors["mean"]) for n in BANKS]
    assert len(found) > 1 and set(found[::2]) == {True} and set(found[1::2]) == {fits == "false"}


def test_global_transport_with_a_frozen_base_is_pro_to_the_bit(tiny, same_bits):
    assert same_bits(tiny("promax", base_rounds=0, transport="global").server, tiny("pro", base_rounds=0).server)
