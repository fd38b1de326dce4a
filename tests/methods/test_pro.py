"""PRO: every mechanism has an effect that would be missing without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil.engine import steps
from profcil.engine.phases import Trained
from profcil.memory.rehearsal import Rehearsal
from profcil.model.net import MODEL, TAIL

LAST = 2  # the last of three rounds


def bank(server, name: str = "memory") -> dict[int, tuple[torch.Tensor, torch.Tensor, int]]:
    """Mean, spread and count of every class."""
    b = server.blocks[name]
    rows = zip(b.labels, b.tensors["mean"], b.tensors["spread"], b.tensors["count"].tolist(), strict=True)
    return {label: (mean, spread, count) for label, mean, spread, count in rows}


def samples(run, upto: int) -> dict[int, int]:
    """The number of training examples per class at the positions up to one."""
    plan = run.world.plan
    y = run.world.bundle.train.y
    count = {}
    for p in range(upto + 1):
        for c in plan.active(p):
            for label in y[torch.from_numpy(plan.samples(int(c), p).copy())].tolist():
                count[label] = count.get(label, 0) + 1
    return count


def phases(run, position: int, round: int) -> dict[str, object]:
    """The training phases of the first participant by name; nothing is trained."""
    when = run.when(position, round)
    names = run.method.broadcast(run.server, when)
    inbox = {n: run.server.blocks[n] for n in names}
    turn = run.method.turn(run.client(run.clients(position, round)[0], position, round), inbox)
    asked = {}
    answer = None
    try:
        while True:
            phase = turn.send(answer)
            asked[phase.name] = phase
            answer = type("Trained", (), {"weights": phase.weights, "loss": 0.0, "steps": 0})
    except StopIteration:
        return asked


def trained(run, client: int, position: int, round: int) -> dict[str, Trained]:
    """The results of the phases of a client's turn, by name."""
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, run.when(position, round))}
    turn = run.method.turn(run.client(client, position, round), inbox)
    found = {}
    answer = None
    try:
        while True:
            phase = turn.send(answer)
            answer = steps.run(run.world.net, phase)
            found[phase.name] = answer
    except StopIteration:
        return found


def filled(fresh, method: str = "pro", **settings):
    """A run after its first position: the memory has classes, and clients have data at the next position."""
    run = fresh(method, **settings)
    for r in range(LAST + 1):
        run.play(0, r)
    run.state.server = run.method.end_position(run.server, run.when(0, LAST))
    return run


# -- plasticity -------------------------------------------------------------------------------------------------------


def test_the_base_moves_in_the_first_rounds_only(tiny):
    run = tiny("pro")
    before = run.before()
    for what, when, server in run.trail:
        if what == "round" and run.clients(when.position, when.round):
            old = before[when.position, when.round].blocks["base"]
            new = server.blocks["base"]
            same = all(torch.equal(old.tensors[k], new.tensors[k]) for k in old.tensors)
            assert same == (when.round >= 2)
            assert (old.version == new.version) == same


def test_a_frozen_base_does_not_change_by_a_bit(fresh):
    run = fresh("pro", base_rounds=0)
    start = run.server.weights()["base"]
    run.stream()
    assert all(torch.equal(t, start[k]) for k, t in run.server.weights()["base"].items())


def test_a_plastic_turn_fits_everything_and_then_rehearses_adapter_and_head(fresh):
    run = fresh("pro")
    plastic = phases(run, 0, 0)
    frozen = phases(run, 0, 2)
    assert list(plastic) == list(frozen) == ["fit", "rehearse"]
    assert plastic["fit"].blocks == (*MODEL, "projector")
    assert frozen["fit"].blocks == plastic["rehearse"].blocks == TAIL
    assert plastic["fit"].proximal == frozen["fit"].proximal == 0.01
    assert plastic["rehearse"].proximal == 0.0  # Eq. (pro-loss) has no proximal term
    assert list(phases(fresh("pro", fit_when_frozen=False), 0, 2)) == ["rehearse"]


def test_auxiliary_loss_and_proximal_term_change_the_fit(fresh, same_bits):
    usual = fresh("pro").play(0, 0)
    assert not same_bits(usual, fresh("pro", auxiliary=0.0).play(0, 0))
    assert not same_bits(usual, fresh("pro", proximal=0.0).play(0, 0))


def test_a_strong_proximal_term_keeps_the_model_near_the_broadcast_one(fresh):
    def moved(pull: float) -> float:
        run = fresh("pro", proximal=pull, train__lr=0.05)
        start = run.server.weights()["base"]
        return float(sum((t - start[k]).norm() for k, t in run.play(0, 0).weights()["base"].items()))

    assert moved(5.0) < 0.5 * moved(0.0)


# -- settings of the phases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["fit", "rehearse"])
def test_each_phase_has_its_own_learning_rate_epochs_and_schedule(fresh, phase):
    (other,) = {"fit", "rehearse"} - {phase}
    run = filled(fresh, **{f"{phase}_lr": 0.25, f"{phase}_epochs": 4, f"{phase}_schedule": "cosine"})
    lr = run.world.config.train.lr
    epochs = run.world.config.train.epochs
    for round, share in enumerate((1.0, 0.75, 0.25)):  # of a cosine over three rounds
        asked = phases(run, 1, round)
        assert asked[phase].settings.lr == pytest.approx(0.25 * share)
        assert asked[phase].epochs == 4
        assert (asked[other].settings.lr, asked[other].epochs) == (lr, epochs)


def test_the_learning_rate_of_rehearsal_changes_rehearsal_only(fresh):
    run = filled(fresh)
    client = run.clients(1, 0)[0]
    one = trained(run, client, 1, 0)
    run.method.params = replace(run.method.params, rehearse_lr=0.001)
    two = trained(run, client, 1, 0)
    fitted = [phase["fit"].weights["head"]["weight"] for phase in (one, two)]
    rehearsed = [phase["rehearse"].weights["head"]["weight"] for phase in (one, two)]
    assert torch.equal(*fitted)
    assert not torch.equal(*rehearsed)


@pytest.mark.parametrize("method", ["pro", "promax"])
@pytest.mark.parametrize("auxiliary", [0.0, 0.05])
def test_broadcast_batch_statistics_are_returned_unchanged(fresh, method, auxiliary):
    run = filled(fresh, method, model__norm="batch", auxiliary=auxiliary)
    sent = run.server.weights()["base"]
    buffers = {name for name, _ in run.world.net.base.named_buffers()}
    assert buffers & sent.keys()

    def changed() -> set[str]:
        replies = [reply.weights()["base"] for reply in run.turns(1, 0)]
        return {k for base in replies for k in base if not torch.equal(base[k], sent[k])}

    assert changed() == sent.keys()
    run.method.params = replace(run.method.params, batch_statistics="broadcast")
    assert changed() == sent.keys() - buffers


# -- rehearsal --------------------------------------------------------------------------------------------------------


def test_memory_before_the_adapter_trains_the_adapter_and_memory_after_it_does_not(fresh):
    for place, changes in (("base", True), ("adapted", False)):
        run = filled(fresh, old_memory=place, base_rounds=0, fit_when_frozen=False)
        start = run.server.weights()["adapter"]
        for reply in run.turns(1, 0):
            same = all(torch.equal(t, start[k]) for k, t in reply.weights()["adapter"].items())
            assert same != changes
            assert not torch.equal(reply.weights()["head"]["weight"], run.server.weights()["head"]["weight"])


def test_rehearsal_holds_real_current_and_remembered_old_classes(fresh):
    run = filled(fresh, noise=0.0)
    phase = phases(run, 1, 0)["rehearse"]
    assert isinstance(phase.source, Rehearsal)
    remembered = bank(run.server)
    current = set(run.world.plan.observed(phase.client, 1))
    epoch = phase.source.epoch(torch.Generator().manual_seed(0))
    assert set(epoch["y"].tolist()) == current | set(remembered)
    for label in set(remembered) - current:
        assert torch.equal(epoch["u"][epoch["y"] == label], remembered[label][0].repeat(20, 1))


def test_without_old_memory_nothing_is_remembered_or_sent(tiny, fresh):
    run = tiny("pro", old_memory="none")
    assert {e.kind for e in run.ledger.entries} == {"model", "header"}
    assert set(run.server.blocks) == set(MODEL)
    asked = phases(filled(fresh, old_memory="none"), 1, 0)["rehearse"]
    assert set(asked.source.epoch(torch.Generator())["y"].tolist()) == set(run.world.plan.observed(asked.client, 1))


@pytest.mark.parametrize("fit", ["own", "remembered", "seen"])
@pytest.mark.parametrize("rehearse", ["remembered", "seen"])
def test_each_phase_competes_over_its_chosen_classes_only(fresh, fit, rehearse):
    run = filled(fresh, fit_space=fit, rehearse_space=rehearse, weight_decay=0.0)
    seen = run.world.plan.seen(1)
    old = set(run.server.blocks["memory"].labels)
    for client in run.clients(1, 0):
        own = set(run.world.plan.observed(client, 1))
        spaces = {"own": own, "remembered": own | old, "seen": seen}
        assert own < own | old < seen
        start = run.server.weights()["head"]["weight"]
        for name, phase in trained(run, client, 1, 0).items():
            end = phase.weights["head"]["weight"]
            changed = set((end != start).any(1).nonzero().flatten().tolist())
            space = spaces[fit if name == "fit" else rehearse]
            assert changed == (space if len(space) > 1 else set())  # with a single class there is no gradient
            start = end


# -- refresh ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["pro", "promax"])
@pytest.mark.parametrize("how", [{}, {"refresh_at": "freeze"}, {"refresh_at": "both"}, {"refresh": "local"}], ids=str)
def test_every_sample_is_counted_once(tiny, method, how):
    run = tiny(method, participants=4, **how)
    for position, server in enumerate(run.after_positions()):
        assert {label: row[2] for label, row in bank(server).items()} == samples(run, position)


def test_a_second_refresh_keeps_the_classes_of_the_first(tiny):
    """With few participants the two refreshes of a position survey different clients."""
    run = tiny("pro", participants=1, refresh_at="both")
    lost = set()
    for what, when, server in run.trail:
        if what == "round" and when.round == 1:
            known = set(server.blocks["memory"].labels)
        if what == "position":
            lost |= known - set(server.blocks["memory"].labels)
    assert lost == set()


def test_the_refresh_measures_under_the_aggregated_model(fresh):
    run = fresh("pro", participants=4)
    for r in range(LAST + 1):
        run.play(1, r)
    features = []
    labels = []
    for c in run.clients(1, LAST):
        client = run.client(c, 1, LAST)
        features.append(client.features(run.server.weights()["base"]))
        labels.append(client.y)
    u, y = torch.cat(features), torch.cat(labels)
    for label, (mean, spread, count) in bank(run.server).items():
        torch.testing.assert_close(mean, u[y == label].mean(0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(spread, u[y == label].std(0, correction=0), rtol=1e-2, atol=5e-3)
        assert count == int((y == label).sum())


def test_local_and_global_statistics_differ(tiny):
    run = tiny("pro", participants=4, refresh="global")
    assert len(run.clients(1, LAST)) > 1  # with one client the local model is the aggregated one
    by_global = bank(run.after_positions()[1])
    by_local = bank(tiny("pro", participants=4, refresh="local").after_positions()[1])
    assert by_global.keys() == by_local.keys()
    new = by_global.keys() - bank(run.after_positions()[0]).keys()
    assert new
    assert all(not torch.allclose(by_global[k][0], by_local[k][0], rtol=1e-3) for k in new)


@pytest.mark.parametrize(("merge", "expected"), [("counts", 30), ("replace", 20)])
def test_counts_of_a_class_that_returns_at_another_client(fresh, assign_samples, merge, expected):
    """Client 0 has task 0 first with ten examples per class, client 1 has it second with twenty."""

    def owner(labels, tasks):
        given = [-1] * len(labels)
        for label in (*tasks[0], *tasks[1]):
            rows = [i for i, y in enumerate(labels) if y == label]
            for i in rows[:10]:
                given[i] = 0
            for i in rows[10:30]:
                given[i] = 1
        return given

    assign_samples(owner, orders=[[0, 1, 2, 3, 4], [1, 0, 2, 3, 4]])
    run = fresh("pro", clients=2, participants=2, merge=merge).stream()
    first, second = run.after_positions()[:2]
    tasks = run.world.plan.tasks
    assert {k: v[2] for k, v in bank(first).items()} == dict.fromkeys(tasks[0], 10) | dict.fromkeys(tasks[1], 20)
    last = {**dict.fromkeys(tasks[0], expected), **dict.fromkeys(tasks[1], 30 if merge == "counts" else 10)}
    assert {k: v[2] for k, v in bank(second).items()} == last


def test_the_adapted_bank_is_optional_and_does_not_change_the_model(tiny):
    plain = tiny("pro")
    both = tiny("pro", adapted_bank=True)
    assert "adapted" not in plain.server.blocks
    block = both.server.blocks["adapted"]
    d = both.world.net.features
    assert block.labels == both.server.blocks["memory"].labels
    assert block.tensors["mean"].shape == (len(block.labels), d)
    assert block.tensors["spread"].shape == (len(block.labels), 1)
    assert torch.equal(block.tensors["count"], both.server.blocks["memory"].tensors["count"])
    weights = [run.server.weights()["head"]["weight"] for run in (plain, both)]
    assert torch.equal(*weights)  # PRO rehearses from the base-space memory only


def test_replies_note_requested_and_served_replays(fresh):
    run = fresh("pro", quota=7, train__epochs=2, setting="homogeneous")
    for r in range(3):
        assert all(reply.notes["replay_requested"] == 0 for reply in run.turns(0, r))
        run.play(0, r)
    for reply in run.turns(1, 0):  # two old classes, both remembered
        assert reply.notes["replay_requested"] == reply.notes["replay_served"] == 2 * 7 * 2
    run.method.params = replace(run.method.params, old_memory="none")
    assert all(reply.notes["replay_served"] == 0 < reply.notes["replay_requested"] for reply in run.turns(1, 0))
