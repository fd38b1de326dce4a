"""Bases of several clients trained in one computation, against one client after another."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from profcil.accel import acceleration, policy
from profcil.accel.acceleration import Acceleration
from profcil.accel.cpu import stacked_clients
from profcil.accel.cpu.client_batch import NotBatchable
from profcil.engine import steps
from profcil.engine.executor import Executor
from profcil.engine.phases import Features, Shuffled, Train, Trained
from profcil.model.losses import cross_entropy

EVEN = {"setting": "homogeneous", "all_seen": True, "warmup__rounds": 0, "train__batch": 16, "lr": 0.01}
FEDERATION = {"clients": 5, "participants": 5, "train__epochs": 2}
RULES: list[dict[str, Any]] = [
    {"optimiser": "sgd"},
    {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0},
    {"optimiser": "adam"},
    {"optimiser": "adam", "decay": "coupled", "weight_decay": 0.1, "clip": 0.1},
    {"optimiser": "sgd", "batch": 0, "clip": 0.05, "lr": 1.0},
]
KINDS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.5},
    "pro": {"proximal": 0.5},  # with the auxiliary loss of a discarded projector, which has no proximal term
    "promax": {"auxiliary": 0.0},
}
TOLERANCE = 2e-5  # of two epochs, where the same sums are taken in another order


@pytest.fixture(scope="module")
def ready(fresh) -> Any:
    """Runs at their beginning, each made once."""
    return cache(lambda method, **more: fresh(method, **(EVEN | FEDERATION | more)))


def first_phases(run: Any, rule: dict[str, Any] | None = None, sizes: list[int] | None = None) -> list[Train]:
    """The first phases of a round's participants; of so many examples each, where sizes are given."""
    inbox = {n: run.server.blocks[n] for n in run.method.broadcast(run.server, run.when(0, 0))}
    phases = [next(run.method.turn(run.client(c, 0, 0), inbox)) for c in run.clients(0, 0)]
    phases = [replace(p, settings=replace(p.settings, **rule or {})) for p in phases]
    if sizes is None:
        return phases
    sources = [Shuffled(p.source.index[:n], p.source.y[:n]) for p, n in zip(phases, sizes, strict=False)]
    return [replace(p, source=source) for p, source in zip(phases, sources, strict=False)]


def alone(net: Any, phases: list[Train]) -> list[Trained]:
    return [steps.run(net, p) for p in phases]


def stacked(net: Any, phases: list[Train]) -> list[Trained]:
    """By the analytic gradient where there is one, as the policy decides."""
    return stacked_clients.run(net, phases, analytic=policy.has_written_convnet_gradient(net, phases[0]))


def apart(one: list[Trained], two: list[Trained]) -> float:
    """The largest difference between results, losses and unmoved blocks included."""
    assert [r.steps for r in one] == [r.steps for r in two]
    gaps = [abs(a.loss - b.loss) for a, b in zip(one, two, strict=True)]
    for a, b in zip(one, two, strict=True):
        assert [(k, list(v)) for k, v in a.weights.items()] == [(k, list(v)) for k, v in b.weights.items()]
        gaps += [float((v - b.weights[k][n]).abs().max()) for k, ts in a.weights.items() for n, v in ts.items()]
    return max(gaps)


def moved(done: list[Trained], phases: list[Train]) -> float:
    """The smallest change of the first layer over all clients."""
    pairs = [(d.weights["base"], p.weights["base"]) for d, p in zip(done, phases, strict=True)]
    return min(float((a["conv1.weight"] - b["conv1.weight"]).abs().max()) for a, b in pairs)


# -- equal to one client after another ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("method", KINDS)
def test_a_stack_ends_where_each_client_ends_alone(ready, method, rule):
    run = ready(method, **KINDS[method])
    net, phases = run.world.net, first_phases(run, rule, sizes=[40, 40, 40, 40, 40])
    assert len({p.length for p in phases}) == 1 and bool(phases[0].proximal) == (method != "fedavg")
    expected = alone(net, phases)
    for group in (slice(None), slice(1, 3)):
        done = stacked(net, phases[group])
        assert apart(done, expected[group]) < TOLERANCE < 1e-3 < moved(done, phases[group])


@pytest.mark.parametrize(
    "more",
    [{"model__norm": "batch"}, {"model__norm": "none"}, {"model__head": "cosine"}, {"augment": "false"}],
    ids=str,
)
@pytest.mark.parametrize("method", ["fedavg", "pro"])
def test_with_every_normalisation_head_and_view(ready, method, more):
    run = ready(method, **more)
    net, phases = run.world.net, first_phases(run, sizes=[40, 36, 33])
    done = stacked(net, phases)
    assert apart(done, alone(net, phases)) < TOLERANCE and moved(done, phases) > 1e-4
    noted = [k for k in phases[0].weights["base"] if "running" in k]
    assert bool(noted) == (more.get("model__norm") == "batch")
    assert all(not torch.equal(done[0].weights["base"][k], phases[0].weights["base"][k]) for k in noted)


def test_single_examples_and_scales_below_zero(ready):
    run = ready("fedprox", mu=0.5)
    phases = first_phases(run, sizes=[1, 16, 7])
    for p in phases:
        p.weights["base"]["norm1.weight"] = p.weights["base"]["norm1.weight"] * torch.tensor([1.0, -1.0, 0.5, -0.5])
    assert apart(stacked(run.world.net, phases), alone(run.world.net, phases)) < TOLERANCE


def test_a_repeated_run_gives_the_same_bits_and_changes_no_input(ready):
    run = ready("pro")
    phases = first_phases(run)
    before = copy.deepcopy([p.weights for p in phases])
    first, again = (stacked(run.world.net, phases) for _ in range(2))
    assert apart(first, again) == 0
    for p, weights in zip(phases, before, strict=True):
        assert all(torch.equal(t, weights[b][k]) for b, ts in p.weights.items() for k, t in ts.items())
    storages = [t.untyped_storage().data_ptr() for d in first for t in d.weights["base"].values()]
    assert len(set(storages)) == len(storages)  # a file cannot store shared memory


# -- analytic gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_compiled_steps_give_the_bits_of_those_in_python_in_any_pieces(ready, monkeypatch, rule):
    run = ready("fedprox", mu=0.5)
    net, phases = run.world.net, first_phases(run, rule, sizes=[40, 40, 40])
    assert (
        policy.has_written_convnet_gradient(net, phases[0])
        and stacked_clients.compiled_steps is not stacked_clients.take_steps
    )
    compiled = stacked(net, phases)
    monkeypatch.setattr(stacked_clients, "compiled_steps", stacked_clients.take_steps)
    monkeypatch.setattr(stacked_clients, "STEPS_AT_ONCE", 2)
    assert apart(compiled, stacked(net, phases)) == 0


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"model__head": "cosine"}),
        ("fedavg", {"model__norm": "batch"}),
        ("pro", {}),  # the auxiliary loss has none
    ],
    ids=str,
)
def test_stacks_without_an_analytic_gradient_use_autograd(ready, monkeypatch, method, more):
    run = ready(method, **more)
    run.play(0, 0)
    monkeypatch.setattr(stacked_clients, "compiled_steps", None)
    assert not policy.has_written_convnet_gradient(run.world.net, first_phases(run)[0])
    run.play(0, 1)
    assert set(run.world.executor.report()["phases"]["fit"]) == {policy.STACK}


def test_without_acceleration_nothing_is_stacked(ready, monkeypatch):
    run = ready("fedavg", accelerate="off")
    monkeypatch.setattr(stacked_clients, "run", None)
    run.play(0, 0)
    assert run.world.executor.acceleration is None and run.world.executor.report()["path"] == "reference"


# -- which clients are grouped -----------------------------------------------------------------------------------------


def test_groups_are_of_equal_length_few_and_the_same_in_any_order(ready):
    run = ready("fedavg")
    phases, found = first_phases(run, sizes=[40, 10, 41, 42, 16]), run.world.executor.acceleration
    for order in (phases, phases[::-1]):
        groups = [[p.client for p in group] for group in found.groups(order)]
        assert sorted(groups) == [[0, 2, 3], [1, 4]]
    shares = {n: [len(g) for g in found.groups(first_phases(run, sizes=[9] * n))] for n in (1, 2, 3, 4, 5)}
    assert shares == {1: [1], 2: [2], 3: [3], 4: [2, 2], 5: [2, acceleration.FEW]}


def test_epochs_of_unequal_length_do_not_share_a_stack(ready):
    run = ready("fedavg")
    phases = first_phases(run, sizes=[40, 10])
    assert policy.way_of(run.world.net, phases, records=False) == policy.REFERENCE
    assert apart(run.world.executor.acceleration.run_group(run.world.net, phases), alone(run.world.net, phases)) == 0


@pytest.mark.parametrize("accelerate", ["auto", "off"])
def test_bases_are_stacked_unless_acceleration_is_off(ready, monkeypatch, accelerate):
    run, sizes = ready("fedavg"), []

    def counted(net, phases, analytic):
        sizes.append(len(phases))
        return alone(net, phases)

    monkeypatch.setattr(stacked_clients, "run", counted)
    inbox = dict(run.server.blocks)
    turns = {c: run.method.turn(run.client(c, 0, 0), inbox) for c in run.clients(0, 0)}
    Executor(run.world.net, accelerate)(turns, lambda *a: True)
    assert sizes == ([] if accelerate == "off" else [2, 3])


def test_the_warm_up_is_computed_client_by_client_on_both_paths(fresh, same_bits, monkeypatch):
    """Its cached result must not depend on how clients are grouped."""
    monkeypatch.setattr("profcil.engine.warmup.read_tensors", lambda path: None)
    one, two = (fresh("fedavg", accelerate=path, clients=5, participants=5) for path in ("auto", "off"))
    assert same_bits(one.server, two.server)


def test_a_model_in_bfloat16_is_not_stacked(ready):
    net = copy.deepcopy(ready("fedavg").world.net)
    assert policy.stackable(net)
    Executor(net, precision="bf16")
    assert not policy.stackable(net)


# -- losses that are for one client at a time --------------------------------------------------------------------------


def by_index(net: Any, batch: Any) -> Tensor:
    return cross_entropy(net(*net.weak(batch["inputs"], batch["rng"])), batch["y"], batch["allowed"][: len(batch["y"])])


def through_the_base(net: Any, batch: Any) -> Tensor:
    return cross_entropy(net.tail.classify(net.base(*batch["inputs"])), batch["y"], batch["allowed"])


def of_nothing(net: Any, batch: Any) -> Tensor:
    return torch.zeros(())


@pytest.mark.parametrize("loss", [by_index, through_the_base, of_nothing])
def test_other_losses_are_refused(ready, loss):
    run = ready("fedavg")
    with pytest.raises(NotBatchable):
        stacked_clients.run(run.world.net, [replace(p, loss=loss) for p in first_phases(run)], analytic=False)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_refused_loss_runs_client_by_client_afterwards(ready, monkeypatch, workers):
    run, tried = ready("fedavg"), []
    net, original = run.world.net, stacked_clients.run
    monkeypatch.setattr(stacked_clients, "run", lambda *a, **k: tried.append(1) or original(*a, **k))
    executor, phases = Executor(net, workers=workers), [replace(p, loss=through_the_base) for p in first_phases(run)]
    for _ in range(2):
        done = executor.run(phases)
        assert apart([done[p.client] for p in phases], alone(net, phases)) == 0
    assert 1 <= len(tried) <= 2 and executor.acceleration.refused == {through_the_base}


def test_an_error_in_a_loss_is_raised(ready):
    run = ready("fedavg")

    def broken(net: Any, batch: Any) -> Tensor:
        return cross_entropy(net(*batch["inputs"]), batch["y"])  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="allowed"):
        Executor(run.world.net).run([replace(p, loss=broken) for p in first_phases(run)])


def test_only_phases_that_move_the_base_are_stacked_this_way(ready):
    run = ready("pro")
    (first, second, *_) = first_phases(run)
    u = torch.randn(20, run.world.net.features, generator=torch.Generator().manual_seed(0))
    tails = [
        replace(p, blocks=("adapter", "head"), loss=run.method.tail_loss, source=Features(u, p.source.y[:20]))
        for p in (first, second)
    ]
    groups = Acceleration(run.world.net).groups([*tails, first, second])
    assert [len(g) for g in groups] == [1, 1, 2]  # phases with an analytic gradient run one by one
    assert [p.on_features for g in groups for p in g] == [True, True, False, False]
