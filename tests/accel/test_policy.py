"""Which way each phase is run: one case for every row of the table in accel/policy.py, and the report of a run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from recorders import EagerRecorder, replaying

from profcil.accel import policy
from profcil.accel.acceleration import Acceleration
from profcil.accel.cpu import adapter_head_epoch
from profcil.accel.cuda_graphs.runner import GraphRunner
from profcil.engine import steps
from profcil.engine.phases import Shuffled, Train, Trained
from profcil.model.losses import classification
from profcil.model.net import TAIL

EVEN = {"setting": "homogeneous", "all_seen": True, "warmup__rounds": 0, "train__batch": 16, "lr": 0.01}
ALL = {"setting": "homogeneous", "clients": 5, "participants": 5}  # all clients in every round: some share a stack
FROZEN = 2  # a round of PRO in which only adapter and head are trained


@pytest.fixture(scope="module")
def ready(fresh) -> Any:
    """Runs at their beginning, each made once."""
    return cache(lambda method, **more: fresh(method, **(EVEN | more)))


def first_phases(run: Any, round: int = 0, sizes: tuple[int, ...] = ()) -> list[Train]:
    """The first phases of a round's participants; with this many examples each, where sizes are given."""
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, run.when(0, round))}
    phases = [next(run.method.turn(run.client(c, 0, round), inbox)) for c in run.clients(0, round)]
    if not sizes:
        return phases
    pairs = list(zip(phases, sizes, strict=False))
    return [replace(p, source=Shuffled(p.source.index[:n], p.source.y[:n])) for p, n in pairs]


def doubled(tail: Any, batch: Any) -> torch.Tensor:
    """A loss on features without an analytic gradient."""
    return 2 * classification(tail, batch)


def with_loss(phases: list[Train], loss: Callable[..., torch.Tensor]) -> list[Train]:
    return [replace(p, loss=loss) for p in phases]


# Every case gives a run and the phases of some of its clients; none has the same way as another.
Case = Callable[[Any], tuple[Any, list[Train]]]
CASES: dict[str, Case] = {
    policy.GRAPH: lambda ready: (run := ready("fedavg"), first_phases(run)),
    policy.STACK_WRITTEN: lambda ready: (run := ready("fedavg"), first_phases(run, sizes=(40, 40))),
    policy.STACK: lambda ready: (run := ready("pro"), first_phases(run, sizes=(40, 40, 40))),
    policy.HEAD_C: lambda ready: (run := ready("pro"), first_phases(run, FROZEN)[:1]),
    policy.HEAD_SCRIPT: lambda ready: (run := ready("pro"), first_phases(run, FROZEN)[:1]),
    policy.HEADS: lambda ready: (run := ready("pro"), with_loss(first_phases(run, FROZEN), doubled)),
    policy.REFERENCE: lambda ready: (run := ready("fedavg"), first_phases(run)[:1]),
}


@pytest.fixture
def case(ready, way, monkeypatch) -> tuple[Acceleration, list[Train]]:
    """The machine on which a way is taken, and phases that take it."""
    run, phases = CASES[way](ready)
    if way == policy.HEAD_SCRIPT:
        monkeypatch.setattr(adapter_head_epoch, "checked_library", lambda: None)
    elif way == policy.HEAD_C and adapter_head_epoch.checked_library() is None:
        pytest.skip("no compiler")
    acceleration = Acceleration(copy.deepcopy(run.world.net))
    if way == policy.GRAPH:
        acceleration.record_on(GraphRunner(acceleration.net, EagerRecorder()))
    return acceleration, phases


def rows_of_the_table() -> list[str]:
    lines = [line for line in (policy.__doc__ or "").splitlines() if line.startswith("| ")]
    return [line.split("|")[1].strip() for line in lines][1:]


def test_every_row_of_the_table_has_a_case():
    assert rows_of_the_table() == list(CASES)


@pytest.mark.parametrize("way", CASES)
def test_a_case_takes_its_way_and_gives_the_results_of_the_reference(case, way):
    acceleration, phases = case
    assert acceleration.way_of(phases) == way
    assert [list(map(id, group)) for group in acceleration.groups(phases)] == [list(map(id, phases))]
    done = acceleration.run(phases)
    assert acceleration.report()["phases"] == {phases[0].name: {way: len(phases)}}
    for phase in phases:
        assert largest_gap(done[phase.client], steps.run(acceleration.net, phase)) < 1e-4


def largest_gap(one: Trained, other: Trained) -> float:
    assert one.steps == other.steps
    gaps = [abs(float(one.loss) - float(other.loss))]
    for block, tensors in one.weights.items():
        gaps += [float((t - other.weights[block][k]).abs().max()) for k, t in tensors.items()]
    return max(gaps)


# -- where a row ends -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("several views", {"method": "pro"}),
        ("another normalisation", {"method": "fedavg", "model__norm": "batch"}),
        ("another head", {"method": "fedavg", "model__head": "cosine"}),
    ],
)
def test_without_an_analytic_gradient_clients_are_stacked_by_autograd(ready, what, more):
    run = ready(**more)
    assert policy.way_of(run.world.net, first_phases(run, sizes=(40, 40)), records=False) == policy.STACK


def test_bases_run_by_the_reference_where_they_cannot_be_stacked(ready):
    run = ready("fedavg")
    net = run.world.net
    assert policy.way_of(net, first_phases(run, sizes=(40, 10)), records=False) == policy.REFERENCE  # unequal epochs
    other = ready("fedavg", model__encoder="resnet18")
    assert policy.way_of(other.world.net, first_phases(other), records=False) == policy.REFERENCE
    rough = copy.deepcopy(net)
    rough.set_precision("bf16")
    assert policy.way_of(rough, first_phases(run, sizes=(40, 40)), records=False) == policy.REFERENCE


def test_heads_run_by_the_reference_where_one_client_has_no_analytic_gradient(ready):
    run = ready("pro")
    phase = first_phases(run, FROZEN)[0]
    assert phase.blocks == TAIL
    for other in (replace(phase, loss=doubled), replace(phase, blocks=("head",))):
        assert policy.way_of(run.world.net, [other], records=False) == policy.REFERENCE


def test_steps_that_cannot_be_recorded_take_another_way(ready):
    run = ready("fedavg")
    phase = first_phases(run)[0]
    full = replace(phase, settings=replace(phase.settings, batch=0))
    assert policy.way_of(run.world.net, [phase], records=True) == policy.GRAPH
    assert policy.way_of(run.world.net, [full], records=True) == policy.REFERENCE


# -- which phases may be grouped --------------------------------------------------------------------------------------


def test_bases_are_grouped_but_for_the_warm_up_and_refused_losses(ready):
    run = ready("fedavg")
    net, phase = run.world.net, first_phases(run)[0]
    assert policy.may_be_grouped(net, phase, records=False, refused=False)
    assert not policy.may_be_grouped(net, phase, records=False, refused=True)
    assert not policy.may_be_grouped(net, replace(phase, name=policy.ALONE), records=False, refused=False)
    assert policy.may_be_grouped(net, replace(phase, name=policy.ALONE), records=True, refused=False)


def test_heads_are_grouped_where_they_are_small_and_have_no_analytic_gradient(ready, monkeypatch):
    run = ready("pro")
    net, phase = run.world.net, first_phases(run, FROZEN)[0]
    assert not policy.may_be_grouped(net, phase, records=False, refused=False)
    assert policy.may_be_grouped(net, replace(phase, loss=doubled), records=False, refused=False)
    monkeypatch.setattr(policy, "SMALL", 0)
    assert not policy.may_be_grouped(net, replace(phase, loss=doubled), records=False, refused=False)


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_counts_the_phases_of_a_run_by_way(fresh):
    run = fresh("pro", **EVEN)
    rounds = range(run.world.config.train.rounds)
    for round in rounds:
        run.play(0, round)
    found = run.world.executor.report()["phases"]
    turns = sum(len(run.clients(0, round)) for round in rounds)
    assert found.keys() == {"fit", "rehearse"}
    assert sum(found["fit"].values()) == turns
    heads = policy.HEAD_C if adapter_head_epoch.checked_library() is not None else policy.HEAD_SCRIPT
    assert set(found["rehearse"]) == {heads}
    assert set(found["fit"]) <= {policy.STACK, policy.REFERENCE, heads} and heads in found["fit"]


def test_the_report_names_phases_that_could_not_be_recorded(fresh, monkeypatch):
    run = fresh("fedavg", **EVEN)
    graphs = replaying(run)
    monkeypatch.setattr(graphs, "limit_reached", lambda: True)
    run.play(0, 0)
    clients = len(run.clients(0, 0))
    assert run.world.executor.report()["phases"] == {"fit": {policy.GRAPH: clients}, "not recorded": {"fit": clients}}


# -- accelerated and reference rounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "way"),
    [
        ("fedavg", policy.STACK_WRITTEN),
        ("promax", policy.STACK),
        ("prolin", policy.REFERENCE),  # its loss works for one client at a time
        ("hr", policy.REFERENCE),
    ],
)
def test_a_round_gives_the_same_weights_on_both_paths(fresh, max_difference, method, way):
    """Every round starts from the same state."""
    accelerated, reference = (fresh(method, accelerate=path, **ALL) for path in ("auto", "off"))
    for round in range(accelerated.world.config.train.rounds):
        reference.state = copy.deepcopy(accelerated.state)
        before = accelerated.server
        one, other = (run.play(0, round) for run in (accelerated, reference))
        assert max_difference(one, other) < 1e-4
        assert one is not before
    ways = accelerated.world.executor.report()["phases"]
    assert way in {way for counts in ways.values() for way in counts}
    assert reference.world.executor.report()["path"] == "reference"
