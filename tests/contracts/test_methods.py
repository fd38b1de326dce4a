"""The contract of every method, third-party ones included: all registered methods are listed and run.

The stream is that of `profcil.contract.stream`: different task orders, a client with one example, idle clients, an idle
position and classes that return.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from profcil import registry
from profcil.contract.case import MethodCase
from profcil.contract.promises import check_writes
from profcil.engine import early_stop
from profcil.engine.channel import KINDS
from profcil.engine.evaluation import evaluation_features
from profcil.engine.executor import Executor
from profcil.errors import NotApplicable, ProfcilError
from profcil.model.net import MODEL
from profcil.plain_values import build
from profcil.reporting.methods import split_docstring, stored
from profcil.runs.models.loading import load_model
from profcil.runs.models.saved_model import save_model

NAMES = registry.names("methods")
MODALITIES = ("image", "text", "graph", "table")
METHODS = {name: registry.find("methods", name).METHOD for name in NAMES}
MODALITY = {name: next(m for m in MODALITIES if m in METHODS[name].modalities) for name in NAMES}
SUPPORTED = [(name, m) for name in NAMES for m in MODALITIES if m in METHODS[name].modalities]
UNSUPPORTED = [(name, m) for name in NAMES for m in MODALITIES if m not in METHODS[name].modalities]
for_every_method = pytest.mark.parametrize("name", NAMES)
on_supported = pytest.mark.parametrize(("name", "modality"), SUPPORTED, ids=[f"{n}-{m}" for n, m in SUPPORTED])
on_unsupported = pytest.mark.parametrize(("name", "modality"), UNSUPPORTED, ids=[f"{n}-{m}" for n, m in UNSUPPORTED])


@pytest.fixture
def finished(example, name):
    """The method's finished run on the first modality that it supports."""
    return example(name, MODALITY[name])


def is_finite(run) -> bool:
    """Whether the final states of server and clients have no NaN or infinity."""
    states = [block.tensors for block in run.server.blocks.values()] + list(run.state.private.values())
    return all(bool(torch.isfinite(t).all()) for state in states for t in state.values())


@for_every_method
def test_a_position_can_be_stopped_early(make, name, monkeypatch):
    """The accuracy is measured after every round, and the method still knows all classes at the end."""
    monkeypatch.setattr(early_stop, "validation_faa", measured := Measured(early_stop.validation_faa))
    run = make(name, MODALITY[name], planned=False, train__rounds=4, train__early_stop=1).stream()
    assert measured.values and all(0 <= value <= 1 for value in measured.values)
    assert is_finite(run) and (run.state.scores.correct[-1] >= 0).all()


class Measured:
    """Keeps the validation FAA, and returns one that never improves, so that all rounds that can be are skipped."""

    def __init__(self, measure: Any) -> None:
        self.measure = measure
        self.values: list[float] = []

    def __call__(self, *given: Any) -> float:
        self.values.append(self.measure(*given))
        return 0.0


# -- modalities -------------------------------------------------------------------------------------------------------


@on_supported
def test_runs_on_its_modalities_and_sends_only_declared_kinds(example, name, modality):
    run = example(name, modality).run
    sent = {entry.kind for entry in run.ledger.entries} - {"header"}
    assert "model" in sent
    assert sent <= run.method.kinds <= set(KINDS)
    assert all(b.kind in KINDS for b in run.server.blocks.values())
    assert is_finite(run)
    assert (run.state.scores.correct[-1] >= 0).all()


@on_unsupported
def test_an_unsupported_modality_is_refused_before_a_run(make, name, modality):
    with pytest.raises(NotApplicable, match=r"not applicable: .+"):
        make(name, modality)


# -- messages ---------------------------------------------------------------------------------------------------------


@on_supported
def test_every_byte_is_in_the_ledger(example, name, modality):
    observed = example(name, modality)
    ledger = observed.run.ledger
    recorded = {}
    for direction in ("down", "up"):
        for kind in KINDS:
            total = ledger.total(direction=direction, kind=kind)
            stages = ("warmup", "dictionary")  # before the stream, and not the method's own messages
            before = sum(ledger.total(direction=direction, kind=kind, stage=stage) for stage in stages)
            if total > before:
                recorded[direction, kind] = total - before
    assert recorded == {key: size for key, size in observed.traffic.bytes.items() if size}


@for_every_method
def test_an_undeclared_kind_is_refused_by_the_channel(make, name):
    run = make(name, MODALITY[name])
    run.method.kinds = frozenset()  # as if nothing had been declared
    with pytest.raises(ProfcilError, match="sends a block of kind"):
        run.stream()


# -- labels, idle clients, single examples, classes that return -------------------------------------------------------


@for_every_method
def test_labels_are_sets_of_class_ids(finished):
    run = finished.run
    plan = run.world.plan
    correct = run.state.scores.correct
    assert all(plan.seen(p) != set(range(len(plan.seen(p)))) for p in (0, 1))
    for p in range(plan.positions):
        introduced = [set(t) <= plan.seen(p) for t in plan.tasks]
        assert (correct[p] >= 0).tolist() == introduced
        assert (correct[p] <= run.state.scores.total).all()
    for block in run.server.blocks.values():
        assert set(block.labels) <= plan.seen(plan.positions - 1)


@for_every_method
def test_the_stream_has_idle_clients_single_examples_and_classes_that_return(finished):
    """The other tests rely on this."""
    plan = finished.run.world.plan
    took_part = {}
    for p in range(plan.positions):
        for r in range(finished.run.world.config.train.rounds):
            for c in finished.run.clients(p, r):
                took_part.setdefault(p, {})[c] = plan.observed(c, p)
    assert sorted(took_part) == [0, 1, 3] and 2 not in plan.active(1)
    assert any(len(plan.samples(2, p)) == 1 and 2 in took_part[p] for p in took_part)
    assert set(took_part[0][0]) == set(took_part[1][1])


@for_every_method
def test_an_idle_client_is_sent_nothing_and_an_idle_position_changes_nothing(finished, same_bits):
    """The blocks that a server trains itself are left out: it trains at every position."""
    run = finished.run
    for entry in run.ledger.entries:
        assert entry.stage == "warmup" or entry.client in run.world.plan.active(entry.position)
    trained = [n for n, b in run.server.blocks.items() if run.method.server_gradients and n not in MODEL]
    after = [server.drop(*trained) for server in (finished.start, *run.after_positions())]
    assert [same_bits(a, b) for a, b in pairwise(after)] == [False, False, True, False]


@for_every_method
def test_runs_with_a_single_client(make, name):
    run = make(name, MODALITY[name], planned=False, clients=1, participants=1, setting="homogeneous", rounds=1).stream()
    assert is_finite(run)
    assert (run.state.scores.correct[-1] >= 0).all()


# -- no hidden state --------------------------------------------------------------------------------------------------


@for_every_method
def test_a_resumed_run_is_bit_identical(finished, make, same_bits, name):
    run = finished.run
    again = make(name, MODALITY[name])
    again.state = finished.saved
    assert (again.state.position, again.state.round) == (1, 2)
    again.stream()
    assert same_bits(run.server, again.server)
    assert np.array_equal(run.state.scores.correct, again.state.scores.correct)
    assert run.ledger.entries == again.ledger.entries
    assert run.state.private.keys() == again.state.private.keys()
    for client, own in run.state.private.items():
        assert own.keys() == again.state.private[client].keys()
        assert all(torch.equal(t, again.state.private[client][k]) for k, t in own.items())


@for_every_method
def test_a_run_does_not_use_the_global_random_state(finished):
    assert finished.same_random_state == (True, True)


@for_every_method
def test_the_result_is_bit_identical_for_any_order_of_clients_and_global_random_state(
    finished, make, same_bits, monkeypatch, name
):
    original = Executor.__call__

    def reversed_call(self, turns, guard):
        torch.manual_seed(len(turns))
        np.random.seed(len(turns))
        return original(self, dict(reversed(turns.items())), guard)

    monkeypatch.setattr(Executor, "__call__", reversed_call)
    again = make(name, MODALITY[name]).stream()
    assert same_bits(finished.run.server, again.server)
    assert np.array_equal(finished.run.state.scores.correct, again.state.scores.correct)


@for_every_method
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
@pytest.mark.parametrize("batched", [False, True], ids=["as on this machine", "heads in one batch"])
def test_accelerated_and_reference_computation_agree(make, max_difference, monkeypatch, name, optimiser, batched):
    """They may differ by rounding, but not in batches, draws or steps. On a CPU, adapters and heads are mostly trained
    one client after another; a GPU computes them in one batch where it cannot record, which is forced here.

    Both runs start from one warm-up: Adam turns rounding errors of tiny gradients into whole steps."""
    if batched:
        policy = pytest.importorskip("profcil.accel.policy", reason="needs the package accel")
        monkeypatch.setattr(policy, "has_written_head_gradient", lambda net, phase: False)
        monkeypatch.setattr(policy, "SMALL", 10**9)
    settings = {"optimiser": optimiser, "lr": 0.01, "participants": 3, "train__batch": 4}
    reference, accelerated = (make(name, MODALITY[name], accelerate=path, **settings) for path in ("off", "auto"))
    accelerated.state.server = reference.server
    for run in (reference, accelerated):
        steps = {-(-len(run.world.plan.samples(c, 0)) // 4) for c in run.clients(0, 0)}
        assert len(steps) > 1  # clients have different numbers of steps
        for r in range(2):
            run.play(0, r)
    assert max_difference(reference.server, accelerated.server) < 1e-4


@on_supported
def test_a_client_does_not_write_to_what_it_was_given(name, modality):
    """In any label space. Later turns and other clients are given the same tensors."""
    if modality == "graph":
        pytest.importorskip("torch_geometric")
    assert check_writes(MethodCase(name, modality)) == ""


@for_every_method
def test_a_method_has_no_attributes_but_its_settings(finished):
    run = finished.run
    assert vars(run.method) == {"params": run.world.config.params}


# -- settings, budgets and replay -------------------------------------------------------------------------------------


@for_every_method
def test_settings_are_frozen_and_each_has_a_help_text(name):
    params = METHODS[name].Params
    assert dataclasses.is_dataclass(params)
    assert params.__dataclass_params__.frozen
    for f in dataclasses.fields(params):
        assert len(f.metadata.get("help", "")) > 5, f"{name}.{f.name} has no help text"
        assert f.default is not dataclasses.MISSING


@for_every_method
def test_regimes_change_existing_settings(name):
    method = METHODS[name]
    assert set(method.regimes) <= {"expanded"}
    for values in method.regimes.values():
        assert build(method.Params, values, name) != method.Params()


@for_every_method
def test_a_method_with_a_budget_records_requested_and_served_replay(finished, name):
    budget = {f.name for f in dataclasses.fields(METHODS[name].Params)} & {"budget", "quota"}
    tally = finished.run.state.tally
    assert ("replay_requested" in tally) == ("replay_served" in tally) == bool(budget)
    if budget:
        assert tally["replay_requested"] > 0
        assert (
            0 < tally["replay_served"] < 1.5 * tally["replay_requested"]
        )  # more than requested only by rounding to whole steps


@for_every_method
def test_replay_gives_valid_samples_and_does_not_change_the_state(finished, same_bits):
    run = finished.run
    world = run.world
    server = run.server
    last = run.when(world.plan.positions - 1, world.config.train.rounds - 1)
    clients = [world.client(c, last, private) for c, private in sorted(run.state.private.items())]
    world.net.load(server.weights())
    world.net.eval()
    for label in world.plan.seen(last.position):
        with torch.no_grad():
            samples = run.method.replay(world.net, server, clients, label, 3, torch.Generator().manual_seed(label))
            if samples is None:
                continue
            features = world.net.base(*samples.tensors) if samples.space == "inputs" else samples.tensors[0]
        assert samples.space in ("inputs", "base", "adapted")
        assert 1 <= len(features) <= 3 and features.shape[1] == world.net.features
        assert bool(torch.isfinite(features.float()).all())
    assert same_bits(server, run.trail[-1][2])


# -- docstrings of methods --------------------------------------------------------------------------------------------


@for_every_method
def test_the_docstring_names_the_paper_and_the_adaptations(name):
    doc = registry.find("methods", name).__doc__
    title, parts = split_docstring(doc)
    assert len(title) > 30
    assert "TODO" not in doc
    assert len(parts) > 1


@for_every_method
def test_the_docstring_says_what_the_method_stores(finished, name):
    documented = [not what.startswith("nothing") for what in stored(registry.find("methods", name).__doc__)]
    run = finished.run
    known = {*MODEL, *run.world.net.attached}
    stores_blocks = any(
        b.tensors for s in run.trail for n, b in s[2].blocks.items() if n not in known or b.kind != "model"
    )
    assert documented == [stores_blocks, any(run.state.private.values())]


# -- the trained model ------------------------------------------------------------------------------------------------


@on_supported
def test_the_saved_model_predicts_as_the_run_did(example, name, modality, tmp_path):
    """Up to rounding: the run is accelerated, the loaded model is not."""
    run = example(name, modality).run
    server = run.server
    save_model(tmp_path, run.world, run.method, server, {})
    model = load_model(tmp_path)
    examples = run.world.evaluation_examples
    inputs = examples.inputs(torch.arange(len(examples)))
    with torch.no_grad():
        features = evaluation_features(run.world, run.method, server)
        expected = run.method.scores(run.world.net, server, features)[:, list(model.seen)]
    found = model.scores(*inputs)[:, list(model.seen)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert model.state.blocks.keys() <= {*MODEL, *OWN_BLOCKS.get(name, ())}


OWN_BLOCKS = {
    "hr": ("latent", "centroids"),
    "probayes": ("solved_head", "dictionary"),
    "prolin": ("solved_head", "anchor", "dictionary"),
}
