"""What every method must honour, third-party ones too: the room is listed, and each occupant is run.

The stream is the one of `conftest`: own task orders, a client with one example, idle clients, an idle position and
classes that return, at any number of methods that may be in the folder.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from profcil import registry
from profcil.config import build
from profcil.contract.promises import Case, untouched
from profcil.engine.executor import Executor
from profcil.engine.payload import KINDS
from profcil.errors import NotApplicable, ProfcilError
from profcil.model.net import MODEL
from profcil.reporting.methods import split_docstring, stored

NAMES = registry.names("methods")
MODALITIES = ("image", "text", "graph")
METHODS = {name: registry.find("methods", name).METHOD for name in NAMES}
HOME = {name: next(m for m in MODALITIES if m in METHODS[name].modalities) for name in NAMES}
CLAIMS = [(name, m) for name in NAMES for m in MODALITIES if m in METHODS[name].modalities]
OTHERS = [(name, m) for name in NAMES for m in MODALITIES if m not in METHODS[name].modalities]
every = pytest.mark.parametrize("name", NAMES)
claimed = pytest.mark.parametrize(("name", "modality"), CLAIMS, ids=[f"{n}-{m}" for n, m in CLAIMS])
refused = pytest.mark.parametrize(("name", "modality"), OTHERS, ids=[f"{n}-{m}" for n, m in OTHERS])


@pytest.fixture
def at_home(example, name):
    """The method's finished run, of images where it can."""
    return example(name, HOME[name])


def finite(run) -> bool:
    held = [b.tensors for b in run.server.blocks.values()] + list(run.state.private.values())
    return all(bool(torch.isfinite(t).all()) for tensors in held for t in tensors.values())


# -- everywhere -------------------------------------------------------------------------------------------------------


@claimed
def test_runs_where_it_claims_to_and_sends_only_what_it_declares(example, name, modality):
    run = example(name, modality).run
    crossed = {e.kind for e in run.ledger.entries} - {"header"}
    assert "model" in crossed
    assert crossed <= run.method.kinds <= set(KINDS)
    assert all(b.kind in KINDS for b in run.server.blocks.values())
    assert finite(run)
    assert (run.state.scores.correct[-1] >= 0).all()


@refused
def test_says_before_a_run_where_it_does_not_apply(make, name, modality):
    with pytest.raises(NotApplicable, match=r"not applicable: .+"):
        make(name, modality)


# -- what crosses -----------------------------------------------------------------------------------------------------


@claimed
def test_the_ledger_shows_every_byte_that_crosses(example, name, modality):
    seen = example(name, modality)
    ledger, booked = seen.run.ledger, {}
    for direction in ("down", "up"):
        for kind in KINDS:
            total = [ledger.total(direction=direction, kind=kind, **at) for at in ({}, {"stage": "warmup"})]
            if total[0] > total[1]:
                booked[direction, kind] = total[0] - total[1]
    assert booked == {k: v for k, v in seen.crossed.bytes.items() if v}


@every
def test_an_undeclared_kind_is_refused_at_the_door(make, name):
    run = make(name, HOME[name])
    run.method.kinds = frozenset()  # as if its author had forgotten to declare anything
    with pytest.raises(ProfcilError, match="model"):
        run.stream()


# -- labels, idle clients, single examples, classes that return -------------------------------------------------------


@every
def test_labels_are_sets_of_class_ids(at_home):
    run = at_home.run
    plan, correct = run.world.plan, run.state.scores.correct
    assert all(plan.seen(p) != set(range(len(plan.seen(p)))) for p in (0, 1))
    for p in range(plan.positions):
        introduced = [set(t) <= plan.seen(p) for t in plan.tasks]
        assert (correct[p] >= 0).tolist() == introduced
        assert (correct[p] <= run.state.scores.total).all()
    for block in run.server.blocks.values():
        assert set(block.labels) <= plan.seen(plan.positions - 1)


@every
def test_the_stream_has_idle_clients_single_examples_and_classes_that_return(at_home):
    """What the other tests rely on."""
    plan, took_part = at_home.run.world.plan, {}
    for p in range(plan.positions):
        for r in range(at_home.run.world.config.train.rounds):
            for c in at_home.run.clients(p, r):
                took_part.setdefault(p, {})[c] = plan.observed(c, p)
    assert sorted(took_part) == [0, 1, 3] and 2 not in plan.active(1)
    assert any(len(plan.samples(2, p)) == 1 and 2 in took_part[p] for p in took_part)
    assert set(took_part[0][0]) == set(took_part[1][1])


@every
def test_an_idle_client_is_sent_nothing_and_an_idle_position_changes_nothing(at_home, same_bits):
    """But for what a server that trains makes of the same model once more."""
    run = at_home.run
    for e in run.ledger.entries:
        assert e.stage == "warmup" or e.client in run.world.plan.active(e.position)
    made = [n for n, b in run.server.blocks.items() if run.method.server_gradients and n not in MODEL]
    after = [server.drop(*made) for server in (at_home.start, *run.after_positions())]
    assert [same_bits(a, b) for a, b in pairwise(after)] == [False, False, True, False]


@every
def test_a_single_client(make, name):
    run = make(name, HOME[name], planned=False, clients=1, participants=1, setting="homogeneous", rounds=1).stream()
    assert finite(run)
    assert (run.state.scores.correct[-1] >= 0).all()


# -- nothing hidden ---------------------------------------------------------------------------------------------------


@every
def test_a_saved_state_goes_on_as_if_nothing_had_happened(at_home, make, same_bits, name):
    run, again = at_home.run, make(name, HOME[name])
    again.state = at_home.saved
    assert (again.state.position, again.state.round) == (1, 2)
    again.stream()
    assert same_bits(run.server, again.server)
    assert np.array_equal(run.state.scores.correct, again.state.scores.correct)
    assert run.ledger.entries == again.ledger.entries
    assert run.state.private.keys() == again.state.private.keys()
    for client, own in run.state.private.items():
        assert own.keys() == again.state.private[client].keys()
        assert all(torch.equal(t, again.state.private[client][k]) for k, t in own.items())


@every
def test_a_run_leaves_the_global_random_state_alone(at_home):
    assert at_home.random == (True, True)


@every
def test_neither_the_order_of_execution_nor_the_global_random_state_changes_a_bit(
    at_home, make, same_bits, monkeypatch, name
):
    original = Executor.__call__

    def backwards(self, turns, guard):
        torch.manual_seed(len(turns))
        np.random.seed(len(turns))
        return original(self, dict(reversed(turns.items())), guard)

    monkeypatch.setattr(Executor, "__call__", backwards)
    again = make(name, HOME[name]).stream()
    assert same_bits(at_home.run.server, again.server)
    assert np.array_equal(at_home.run.state.scores.correct, again.state.scores.correct)


@every
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_serial_and_stacked_execution_agree(make, apart, name, optimiser):
    """Rounding may differ; batches, draws and steps may not."""
    servers = []
    for executor in ("serial", "stacked"):
        run = make(name, HOME[name], executor=executor, optimiser=optimiser, lr=0.01, participants=3, train__batch=4)
        assert len({-(-len(run.world.plan.samples(c, 0)) // 4) for c in run.clients(0, 0)}) > 1  # epochs differ
        for r in range(2):
            run.play(0, r)
        servers.append(run.server)
    assert apart(*servers) < 1e-4


@claimed
def test_a_client_changes_nothing_that_it_was_given(name, modality):
    """In any label space; a later turn, or somebody else, is given the same tensors."""
    if modality == "graph":
        pytest.importorskip("torch_geometric")
    assert untouched(Case(name, modality)) == ""


@every
def test_a_method_holds_nothing_but_its_settings(at_home):
    run = at_home.run
    assert vars(run.method) == {"params": run.world.config.params}


# -- settings, budgets and what is replayed ---------------------------------------------------------------------------


@every
def test_settings_are_frozen_and_each_has_a_help_text(name):
    params = METHODS[name].Params
    assert dataclasses.is_dataclass(params)
    assert params.__dataclass_params__.frozen
    for f in dataclasses.fields(params):
        assert len(f.metadata.get("help", "")) > 5, f"{name}.{f.name} has no help text"
        assert f.default is not dataclasses.MISSING


@every
def test_regimes_are_settings_that_exist(name):
    method = METHODS[name]
    assert set(method.regimes) <= {"expanded"}
    for values in method.regimes.values():
        assert build(method.Params, values, name) != method.Params()


@every
def test_a_method_with_a_budget_records_what_was_asked_for_and_served(at_home, name):
    budget = {f.name for f in dataclasses.fields(METHODS[name].Params)} & {"budget", "quota"}
    tally = at_home.run.state.tally
    assert ("replay_requested" in tally) == ("replay_served" in tally) == bool(budget)
    if budget:
        assert tally["replay_requested"] > 0
        assert 0 < tally["replay_served"] < 1.5 * tally["replay_requested"]  # more only by rounding to whole steps


@every
def test_what_is_replayed_can_be_shown_and_showing_it_changes_nothing(at_home, same_bits):
    run = at_home.run
    world, server = run.world, run.server
    last = run.when(world.plan.positions - 1, world.config.train.rounds - 1)
    clients = [world.client(c, last, own) for c, own in sorted(run.state.private.items())]
    world.net.load(server.weights())
    world.net.eval()
    for label in world.plan.seen(last.position):
        with torch.no_grad():
            shown = run.method.replay(world.net, server, clients, label, 3, torch.Generator().manual_seed(label))
            if shown is None:
                continue
            found = world.net.base(*shown.tensors) if shown.space == "inputs" else shown.tensors[0]
        assert shown.space in ("inputs", "base", "adapted")
        assert 1 <= len(found) <= 3 and found.shape[1] == world.net.features
        assert bool(torch.isfinite(found.float()).all())
    assert same_bits(server, run.trail[-1][2])


# -- what a method says of itself -------------------------------------------------------------------------------------


@every
def test_a_method_says_where_it_comes_from_and_what_became_of_it(name):
    doc = registry.find("methods", name).__doc__
    title, parts = split_docstring(doc)
    assert len(title) > 30
    assert "TODO" not in doc
    assert len(parts) > 1


@every
def test_a_method_says_what_it_stores_and_stores_nothing_else(at_home, name):
    said = [not what.startswith("nothing") for what in stored(registry.find("methods", name).__doc__)]
    run = at_home.run
    known = {*MODEL, *run.world.net.attached}
    beyond = any(b.tensors for s in run.trail for n, b in s[2].blocks.items() if n not in known or b.kind != "model")
    assert said == [beyond, any(run.state.private.values())]
