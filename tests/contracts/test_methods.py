"""What every method must honour, third-party ones too: the room is listed, and each occupant is run."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from profcil import rooms
from profcil.data.bundle import Bundle, Nodes, Rows
from profcil.data.shelf import load_bundle
from profcil.engine import world as worlds
from profcil.engine.executors.local import Executor
from profcil.engine.folder import RunFolder
from profcil.engine.payload import KINDS
from profcil.errors import ProfcilError

NAMES = rooms.names("methods")
every = pytest.mark.parametrize("name", NAMES)
DATASET = {"image": "digits", "text": "clinc150", "graph": "cora"}
CLASSES, EACH = 6, 24  # of the made-up text and graph


def method_of(name: str) -> type:
    return rooms.find("methods", name).METHOD


def home(name: str) -> str:
    """The modality in which a method is examined: images where it can."""
    return next(m for m in DATASET if m in method_of(name).modalities)


def labelled(seed: int, each: int) -> tuple[torch.Tensor, torch.Generator]:
    return torch.arange(CLASSES).repeat(each), torch.Generator().manual_seed(seed)


def images() -> Bundle:
    """Every class of digits, twenty-five examples each."""
    bundle = load_bundle("digits", Path("nowhere"), 0)
    ids = torch.cat([torch.nonzero(bundle.train.y == y).flatten()[:25] for y in range(10)])
    return replace(bundle, train=bundle.train.part(ids), fingerprint="few digits")


def texts() -> Bundle:
    """Six classes, each with words of its own among common ones."""

    def part(seed: int, each: int) -> Rows:
        y, rng = labelled(seed, each)
        words = torch.randint(1, 30, (len(y), 6), generator=rng)
        words[:, 2] = 30 + y
        words[::3, 5] = 0
        return Rows(words, y)

    facts = replace(rooms.find("data", "clinc150").FACTS, classes=CLASSES)
    names = tuple(map(str, range(CLASSES)))
    return Bundle(facts, part(1, EACH), part(2, 8), None, names, vocabulary=30 + CLASSES, fingerprint="few words")


def graphs() -> Bundle:
    """Six classes on one random graph, a quarter of the nodes for testing."""
    y, rng = labelled(3, EACH)
    x = torch.nn.functional.one_hot(y, 8).float() + 0.3 * torch.rand(len(y), 8, generator=rng)
    ends = torch.randint(len(y), (2, 400), generator=rng)
    ends = ends[:, ends[0] != ends[1]]
    edges = torch.unique(torch.cat([ends, ends.flip(0)], 1), dim=1)
    test = torch.arange(len(y)) >= len(y) * 3 // 4
    parts = [Nodes(x, edges, y[m], torch.nonzero(m).flatten()) for m in (~test, test)]
    facts = replace(rooms.find("data", "cora").FACTS, classes=CLASSES)
    return Bundle(facts, parts[0], parts[1], None, tuple(map(str, range(CLASSES))), fingerprint="a few nodes")


BUNDLES = {"image": images, "text": texts, "graph": graphs}


@pytest.fixture
def make(fresh, monkeypatch):
    """Makes tiny runs of any method on the modality given, or on its home."""

    def begin(name: str, modality: str | None = None, **settings):
        modality = modality or home(name)
        if modality == "graph":
            pytest.importorskip("torch_geometric")
        monkeypatch.setattr(worlds, "load_bundle", lambda *a: BUNDLES[modality]())
        return fresh(name, dataset=DATASET[modality], task_size=2, **settings)

    return begin


CLAIMS = [(name, m) for name in NAMES for m in DATASET if m in method_of(name).modalities]


@pytest.mark.parametrize(("name", "modality"), CLAIMS, ids=str)
def test_runs_where_it_claims_to_and_sends_only_what_it_declares(make, name, modality):
    run = make(name, modality).stream()
    crossed = {e.kind for e in run.ledger.entries} - {"header"}
    assert "model" in crossed
    assert crossed <= run.method.kinds <= set(KINDS)
    assert all(b.kind in KINDS for b in run.server.blocks.values())
    assert all(bool(torch.isfinite(t).all()) for b in run.server.blocks.values() for t in b.tensors.values())


@every
def test_an_undeclared_kind_is_refused_at_the_door(make, name):
    run = make(name)
    run.method.kinds = frozenset()  # as if its author had forgotten to declare anything
    with pytest.raises(ProfcilError, match="model"):
        run.stream()


@every
def test_labels_are_sets_of_class_ids(make, name):
    run = make(name).stream()
    plan, correct = run.world.plan, run.state.scores.correct
    assert any(plan.seen(p) != set(range(len(plan.seen(p)))) for p in range(plan.positions))
    for p in range(plan.positions):
        introduced = [set(t) <= plan.seen(p) for t in plan.tasks]
        assert (correct[p] >= 0).tolist() == introduced
        assert (correct[p] <= run.state.scores.total).all()
    for block in run.server.blocks.values():
        assert set(block.labels) <= plan.seen(plan.positions - 1)


@every
def test_a_saved_state_goes_on_as_if_nothing_had_happened(make, same_bits, tmp_path, name):
    run = make(name)
    again = make(name)
    with RunFolder(tmp_path / "run") as folder:

        def save(what, when, facts):
            if (what, when.position, when.round) == ("round", 1, 1):
                folder.save(run.state, "", {})

        run.stream(save)
        again.state, *_ = folder.load(torch.device("cpu"))
    assert (again.state.position, again.state.round) == (1, 2)
    again.stream()
    assert same_bits(run.server, again.server)
    assert np.array_equal(run.state.scores.correct, again.state.scores.correct)
    assert run.ledger.entries == again.ledger.entries
    assert run.state.private.keys() == again.state.private.keys()


@every
def test_a_run_leaves_the_global_random_state_alone(make, name):
    torch.manual_seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    make(name).stream()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])


@every
def test_the_global_random_state_does_not_leak_in(make, same_bits, name):
    servers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        servers.append(make(name).stream().server)
    assert same_bits(*servers)


@every
@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_serial_and_stacked_execution_agree(make, apart, name, optimiser):
    """Rounding may differ; batches, draws and steps may not."""
    uneven = {"setting": "homogeneous", "dirichlet": 0.5, "train__batch": 4, "train__epochs": 2}
    servers = []
    for executor in ("serial", "stacked"):
        run = make(name, executor=executor, optimiser=optimiser, lr=0.01, **uneven)
        assert len({len(run.world.plan.samples(c, 0)) // 4 for c in run.clients(0, 2)}) > 1  # epochs differ in length
        for r in range(3):
            run.play(0, r)
        servers.append(run.server)
    assert apart(*servers) < 1e-4


@every
@pytest.mark.parametrize("executor", ["serial", "stacked"])
def test_the_order_of_execution_does_not_change_a_bit(make, same_bits, monkeypatch, name, executor):
    usual = make(name, executor=executor).stream()
    original = Executor.__call__

    def backwards(self, turns, guard):
        return original(self, dict(reversed(turns.items())), guard)

    monkeypatch.setattr(Executor, "__call__", backwards)
    assert same_bits(usual.server, make(name, executor=executor).stream().server)


@every
def test_settings_are_frozen_and_each_has_a_help_text(name):
    params = method_of(name).Params
    assert dataclasses.is_dataclass(params)
    assert params.__dataclass_params__.frozen
    for f in dataclasses.fields(params):
        assert len(f.metadata.get("help", "")) > 5, f"{name}.{f.name} has no help text"
        assert f.default is not dataclasses.MISSING


@every
def test_a_method_says_where_it_comes_from_and_holds_nothing_but_its_settings(make, name):
    module = rooms.find("methods", name)
    assert module.__doc__
    run = make(name)
    before = dict(vars(run.method))
    run.stream()
    assert vars(run.method) == before == {"params": run.world.config.params}
