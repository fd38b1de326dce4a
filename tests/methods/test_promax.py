"""PRO-MAX: the memory is transported while the representation moves, and only then."""

from __future__ import annotations

import pytest
import torch

from profcil.memory.transport import combine
from profcil.methods.parts.memory_blocks import bank_of
from profcil.methods.promax import calibration_subset

BANKS = ("memory", "adapted")


def moves(run) -> list[tuple[bool, bool, bool]]:
    """For every round with participants and a memory, except last rounds: (base moves, means moved, rest unchanged)."""
    before = run.before()
    found = []
    for what, when, server in run.trail:
        if what != "round" or when.final or not run.clients(when.position, when.round):
            continue
        old = before[when.position, when.round].blocks["memory"]
        new = server.blocks["memory"]
        if old.labels:
            moved = not torch.equal(old.tensors["mean"], new.tensors["mean"])
            rest = all(torch.equal(old.tensors[k], new.tensors[k]) for k in ("spread", "count"))
            found.append((when.round < 2, moved, rest))
    assert {plastic for plastic, _, _ in found} == {True, False}
    return found


def test_promax_moves_the_means_in_plastic_rounds_only(tiny):
    assert all(moved == plastic and rest for plastic, moved, rest in moves(tiny("promax", train__rounds=4)))


def test_pro_does_not_move_the_memory(tiny):
    assert not any(moved for _, moved, _ in moves(tiny("pro", train__rounds=4)))


def test_with_learning_rate_zero_means_do_not_move(tiny):
    assert not any(moved for _, moved, _ in moves(tiny("promax", train__rounds=4, lr=0.0)))


def test_with_a_frozen_base_promax_is_pro_to_the_bit(tiny, same_bits):
    assert same_bits(tiny("promax", base_rounds=0).server, tiny("pro", base_rounds=0).server)
    assert tiny("promax", base_rounds=0).ledger.total(kind="transport") == 0


def ready(fresh, **settings):
    """A run after the rounds of its first position."""
    run = fresh("promax", **settings)
    for r in range(3):
        run.play(0, r)
    return run


def test_the_server_applies_the_confidence_weighted_mean_of_the_shifts(fresh):
    run = ready(fresh)
    reports = [r.blocks["memory_transport"].tensors for r in run.turns(1, 0)]
    assert len(reports) > 1
    old = run.server.blocks["memory"].tensors["mean"]
    shift = combine([t["shift"] for t in reports], [t["confidence"] for t in reports])
    assert float(shift.abs().max()) > 0
    torch.testing.assert_close(run.play(1, 0).blocks["memory"].tensors["mean"], old + shift)


def test_a_client_rehearses_from_the_moved_means(fresh):
    run = ready(fresh, noise=0.0)
    client = run.client(run.clients(1, 0)[0], 1, 0)
    turn = run.method.turn(client, dict(run.server.blocks))
    fit = next(turn)
    fitted = {b: {k: t + 0.1 for k, t in tensors.items()} for b, tensors in fit.weights.items()}
    rehearse = turn.send(type("Trained", (), {"weights": fitted, "loss": 0.0, "steps": 1}))
    labels = run.server.blocks["memory"].labels
    old = [i for i, y in enumerate(labels) if y not in client.labels]
    assert old
    assert rehearse.source.bank_rows.tolist() == old
    assert not torch.allclose(rehearse.source.mean, run.server.blocks["memory"].tensors["mean"][old])


@pytest.mark.parametrize("setting", [{"neighbours": 1}, {"bandwidth": 0.1}, {"tau": 3.0}, {"calibration": 4}], ids=str)
def test_every_setting_of_the_transport_has_an_effect(fresh, setting):
    default = ready(fresh).turns(1, 0)[0].blocks["memory_transport"].tensors
    other = ready(fresh, **setting).turns(1, 0)[0].blocks["memory_transport"].tensors
    assert not torch.equal(default["confidence"], other["confidence"])


def test_adapted_means_move_and_keep_their_length(fresh):
    run = ready(fresh, adapted_bank=True)
    old = run.server.blocks["adapted"].tensors
    new = run.play(1, 0).blocks["adapted"].tensors
    assert not torch.equal(old["mean"], new["mean"])
    torch.testing.assert_close(old["mean"].norm(dim=1), new["mean"].norm(dim=1))
    assert torch.equal(old["spread"], new["spread"])


# -- transport under the aggregated model -----------------------------------------------------------------------------


def test_global_transport_is_the_drift_of_the_aggregated_model(fresh):
    """The expected shift is computed here: the drift of the participants' calibration examples from the broadcast base
    to the aggregated one."""
    run = fresh("promax", transport="global", setting="homogeneous")
    for round in range(3):
        run.play(0, round)
    before = run.server
    after = run.play(1, 0)
    bank = bank_of(before.blocks["memory"])
    reports = []
    for c in run.clients(1, 0):
        client = run.client(c, 1, 0)
        index = calibration_subset(client, run.method.params.calibration)
        old = client.features(before.blocks["base"].tensors, index)
        new = client.features(after.blocks["base"].tensors, index)
        reports.append(run.method.shift_of(bank.mean, old, new))
    shift = combine([shift for shift, _ in reports], [confidence for _, confidence in reports])
    assert len(bank) and shift.abs().max() > 0
    assert torch.allclose(after.blocks["memory"].tensors["mean"], bank.mean + shift, atol=1e-6)


@pytest.mark.parametrize("adapted", ["true", "false"])
def test_global_transport_moves_means_in_plastic_rounds_only_and_sends_as_much_as_local(tiny, adapted):
    run = tiny("promax", train__rounds=4, transport="global", adapted_bank=adapted)
    assert all(moved == plastic and rest for plastic, moved, rest in moves(run))
    local = tiny("promax", train__rounds=4, adapted_bank=adapted)
    assert run.ledger.total(kind="transport", stage="round") == 0
    assert run.ledger.total(kind="transport", stage="refresh") == local.ledger.total(kind="transport")


@pytest.mark.parametrize("transport", ["local", "global"])
@pytest.mark.parametrize("fits", ["true", "false"])
def test_adapted_memory_follows_the_fitting_phase_of_frozen_rounds(tiny, fits, transport):
    """In a frozen round the fitting phase moves the adapter but not the base. Rehearsal from adapted memory moves
    neither. Remembered classes compete in the fitting loss: over one class of its own, a client has no loss."""
    more = {"fit_space": "remembered", "old_memory": "adapted", "fit_when_frozen": fits, "transport": transport}
    run = tiny("promax", train__rounds=4, **more)
    found = []
    for (position, round), server in run.before().items():
        after = next(s for what, w, s in run.trail if (what, w.position, w.round) == ("round", position, round))
        if round == 2 and server.blocks["adapted"].labels and run.clients(position, round):
            found += [torch.equal(server.blocks[n].tensors["mean"], after.blocks[n].tensors["mean"]) for n in BANKS]
    assert len(found) > 1 and set(found[::2]) == {True} and set(found[1::2]) == {fits == "false"}


def test_global_transport_with_a_frozen_base_is_pro_to_the_bit(tiny, same_bits):
    assert same_bits(tiny("promax", base_rounds=0, transport="global").server, tiny("pro", base_rounds=0).server)
