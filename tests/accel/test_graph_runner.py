"""Recorded steps against eager ones, with a recorder that calls the step again instead of capturing it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorders import EagerRecorder, replaying
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from profcil.accel import policy, resnet, sources, stacked_heads
from profcil.accel.cuda_graphs import runner as recorded
from profcil.accel.cuda_graphs import static_steps
from profcil.accel.cuda_graphs.flat_layout import FlatLayout, sorted_for_row
from profcil.accel.cuda_graphs.runner import GraphRunner
from profcil.accel.cuda_graphs.static_steps import BaseStep, FusedHeadStep, HeadStep, StaticStep
from profcil.accel.cuda_graphs.updates import MaskedUpdate, Update
from profcil.config import TrainSettings
from profcil.engine import steps
from profcil.engine.executor import Executor
from profcil.engine.phases import Train, Trained
from profcil.engine.warmup import compute
from profcil.errors import Failure
from profcil.model.losses import cross_entropy
from profcil.model.net import Tail

BATCH, CHUNK = 16, 3
UNEVEN = {
    "setting": "homogeneous",
    "dirichlet": 0.5,
    "all_seen": True,
    "warmup__rounds": 0,
    "train__batch": BATCH,
    "train__epochs": 2,
    "lr": 0.01,
}
RULES = [
    {"optimiser": "sgd"},
    {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0},
    {"optimiser": "adam"},
    {"optimiser": "adam", "decay": "coupled", "weight_decay": 0.1, "clip": 0.1},
]


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of few batches, so that even a tiny epoch fills it several times."""
    monkeypatch.setattr(static_steps, "CHUNK", CHUNK)
    monkeypatch.setattr(static_steps, "UNROLL", (2,))
    monkeypatch.setattr(static_steps, "UNROLL_AFTER", 0)


def lengths(phases: list[Train]) -> list[int]:
    """Steps in each phase's epoch."""
    return [-(-p.source.size // BATCH) for p in phases]


@pytest.fixture(scope="module")
def ready(fresh) -> Any:
    """Runs at their beginning, each made once. Computing their phases does not change their nets."""
    return cache(lambda method, **more: fresh(method, **(UNEVEN | more)))


TOLERANCE = 2e-5  # of two epochs, where the same sums are taken in another order


def first_phases(run: Any, round: int, rule: dict[str, Any] | None = None, **changes: Any) -> list[Train]:
    """The first phases of a round's participants, from the run's present state."""
    names = run.method.broadcast(run.server, run.when(0, round))
    inbox = {n: run.server.blocks[n] for n in names}
    phases = [next(run.method.turn(run.client(c, 0, round), inbox)) for c in run.clients(0, round)]
    return [replace(p, settings=replace(p.settings, **rule or {}), **changes) for p in phases]


def apart(one: list[Trained], two: list[Trained]) -> float:
    """The largest difference between results, losses and unmoved blocks included."""
    assert [r.steps for r in one] == [r.steps for r in two]
    gaps = [abs(a.loss - b.loss) for a, b in zip(one, two, strict=True)]
    for a, b in zip(one, two, strict=True):
        assert {k: v.keys() for k, v in a.weights.items()} == {k: v.keys() for k, v in b.weights.items()}
        gaps += [float((v - b.weights[k][n]).abs().max()) for k, ts in a.weights.items() for n, v in ts.items()]
    return max(gaps)


def one_by_one(net: Any, phases: list[Train]) -> list[Trained]:
    """The results of the reference."""
    return [steps.run(net, phase) for phase in phases]


def eagerly(net: Any, phases: list[Train]) -> list[Trained]:
    """The results without a recording: several adapters and heads as one batched computation, bases one by one."""
    stacked = phases[0].on_features and len(phases) > 1
    return stacked_heads.run(net, phases) if stacked else one_by_one(net, phases)


def moved(done: list[Trained], phases: list[Train]) -> bool:
    pairs = zip(done, phases, strict=True)
    return all(not torch.equal(d.weights["head"]["weight"], p.weights["head"]["weight"]) for d, p in pairs)


class NoReadingBack(TorchDispatchMode):
    """Refuses what a stream that is being captured refuses: reading back, shapes from values, tensors from the host."""

    BANNED = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh", "is_nonzero", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(word in name for word in self.BANNED), f"{name} inside a recorded step"
        if "aten.index." in name:
            kinds = {t.dtype for t in args[1] if t is not None}
            assert not kinds & {torch.bool, torch.uint8}, "a mask as an index has a shape that depends on values"
        return func(*args, **(kwargs or {}))


class Strict(EagerRecorder):
    """A stand-in that holds a step to the rules of a capture, in the one run that a capture would take."""

    def record(self, step: Any, rows: int, warm: Any = None) -> Any:
        super().record(step, rows, warm)
        with NoReadingBack(), host_forbidden():
            step()
        return step


@contextmanager
def host_forbidden() -> Iterator[None]:
    def refuse(self: Tensor, *a: Any, **k: Any) -> Any:
        raise AssertionError("a tensor was read by the host inside a recorded step")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__int__", "__float__", "__index__"):
            patch.setattr(Tensor, name, refuse)
        yield


def addresses(step: StaticStep) -> list[int]:
    tensors = [*step.table.values(), *step.constants.values(), step.number, step.total]
    if isinstance(step, HeadStep):
        rule = step.rule
        more = [*step.parameters, step.flat, step.lengths, rule.p, rule.first, rule.second, rule.times]
        return [t.data_ptr() for t in [*tensors, *more]]
    assert isinstance(step, BaseStep)
    own = step.models
    rules = [t for r in own.rules for t in (r.row, *chain(*r.optimiser.moments))]
    modules = [t for net in own.nets for t in net.state_dict().values()]
    return [t.data_ptr() for t in [*tensors, own.matrix, own.grad, own.buffers, step.lengths, *rules, *modules]]


# -- equal to the eager path ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro"])
def test_recorded_steps_of_several_bases_give_the_eager_results(ready, method, rule):
    """FedProx and PRO have a proximal term, PRO also the auxiliary loss of a projector that is discarded; both draw
    views. Sums over all parameters of a client are taken in another order than eagerly, hence not the same bits; draws
    must be the same."""
    run = ready(method)
    phases, net = first_phases(run, 0, rule), run.world.net
    assert len(set(lengths(phases))) > 1 and max(lengths(phases)) > CHUNK
    eager = one_by_one(net, phases)
    graphs = GraphRunner(net, Strict())
    for group in (slice(None), slice(None), slice(1, None), slice(1)):
        replayed = graphs.run(phases[group])
        assert moved(replayed, phases[group]) and apart(eager[group], replayed) < TOLERANCE
    (step,) = graphs.known.values()
    assert graphs.recordings == len(step.recordings)  # each recorded once
    assert {rows for rows, _ in step.recordings} == {1, 2, 3} and {n for _, n in step.recordings} == {1, 2}


class Library:
    """Stands in for the convolutions that only a GPU has."""

    called = 0

    @staticmethod
    def supports(x: Tensor, weight: Tensor, step: int, groups: int) -> bool:
        return True

    @classmethod
    def forward(cls, x: Tensor, weight: Tensor, step: int) -> tuple[Tensor, Tensor]:
        cls.called += 1
        return F.conv2d(x, weight, None, step, weight.shape[2] // 2), torch.zeros(1, 2, len(weight))

    @staticmethod
    def input_gradient(d: Tensor, weight: Tensor, step: int, beside: tuple[Tensor, Tensor] | None = None) -> Tensor:
        shape = (len(d), weight.shape[1], *(n * step for n in d.shape[2:]))
        dx = torch.nn.grad.conv2d_input(shape, weight, d, step, 1)
        return dx if beside is None else dx + torch.nn.grad.conv2d_input(shape, beside[1], beside[0], step, 0)

    @staticmethod
    def filter_gradient(d: Tensor, x: Tensor, step: int, side: int = 3) -> Tensor:
        return torch.nn.grad.conv2d_weight(x, (d.shape[1], x.shape[1], side, side), d, step, side // 2)


@pytest.mark.parametrize("method", ["fedavg", "pro"])
def test_a_residual_network_s_recorded_steps_go_through_its_fused_layers(ready, monkeypatch, method):
    """As on a GPU, with formulas for kernels: two handles, sums of convolutions, gradients where they are needed."""
    run = ready(method, model__encoder="resnet18", model__width=4, model__norm="batch")
    phases, net = first_phases(run, 0, {"lr": 1e-4}, epochs=1), run.world.net  # so that rounding is not amplified
    eager = one_by_one(net, phases)
    monkeypatch.setattr(resnet, "fits", lambda x: x.dim() == 4)
    monkeypatch.setattr(resnet, "conv_kernels", lambda: Library)
    monkeypatch.setattr(Library, "called", 0)
    layered = one_by_one(net, phases)
    assert Library.called == 0  # not recorded
    replayed = GraphRunner(net, Strict()).run(phases)
    assert Library.called > 0 and moved(replayed, phases)
    assert apart(eager, layered) < TOLERANCE and apart(eager, replayed) < TOLERANCE


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("round", [2, 0], ids=["fit with a proximal term", "rehearse"])
def test_a_recorded_stack_gives_the_eager_results(ready, rule, round):
    """Round 2 is frozen and fits the tail with a proximal term; `base_rounds = 0` makes round 0 rehearse at once."""
    more = {"fit_when_frozen": "false", "base_rounds": 0, "quota": 30} if round == 0 else {}
    run = ready("pro", **more)
    phases, net = first_phases(run, round, rule), run.world.net
    assert phases[0].on_features and bool(phases[0].proximal) == (round == 2)
    graphs = GraphRunner(net, Strict())
    for group in (phases, phases[::-1], phases[1:], phases[:1]):
        replayed, alone = graphs.run(group), len(group) == 1  # then the eager path uses torch's own update rules
        assert moved(replayed, group) and apart(eagerly(net, group), replayed) < (1e-5 if alone else 1e-6)
    assert len(graphs.known) == 1


class PlainGradients:
    """Stands in for the kernels of a stack: the same tensors in the same places, by autograd."""

    def __init__(self, flat: Tensor, shapes: dict[str, torch.Size], batch: int) -> None:
        self.shapes, self.losses = shapes, flat.new_zeros(len(flat))

    def __call__(self, flat: Tensor, u: Tensor, y: Tensor, number: Tensor, allowed: Tensor, grad: Tensor) -> None:
        pieces = flat.detach().split([s.numel() for s in self.shapes.values()], 1)
        named = zip(self.shapes.items(), pieces, strict=True)
        own = {k: v.reshape(len(flat), *shape).requires_grad_() for (k, shape), v in named}
        due = number.remainder(len(u))
        loss = cross_entropy(Tail(own, own).classify(u[due][0]), y[due][0], allowed)
        found = torch.autograd.grad(loss.sum(), list(own.values()))
        grad.copy_(torch.cat([g.flatten(1) for g in found], 1))
        self.losses.copy_(loss.detach())

    def count(self, total: Tensor, number: Tensor, active: Tensor) -> None:
        total.add_(self.losses.masked_fill(~active, 0.0))
        number.add_(1)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("round", [0, 2])
def test_a_stack_by_kernels_gives_the_eager_results(ready, monkeypatch, rule, round):
    more = {"fit_when_frozen": "false", "base_rounds": 0, "quota": 30} if round == 0 else {}
    run = ready("pro", **more)
    phases, net = first_phases(run, round, rule), run.world.net
    assert not FusedHeadStep.fits(net, phases[0])  # without a GPU
    monkeypatch.setattr(FusedHeadStep, "fits", staticmethod(lambda *a: True))
    monkeypatch.setattr(static_steps, "_head_kernels", lambda: SimpleNamespace(HeadGradient=PlainGradients))
    graphs = GraphRunner(net, EagerRecorder())
    for group in (phases, phases[1:]):
        replayed = graphs.run(group)
        assert moved(replayed, group) and apart(eagerly(net, group), replayed) < 1e-5
    assert all(isinstance(step, FusedHeadStep) for step in graphs.known.values())


def test_a_client_whose_epoch_is_over_is_not_computed(ready, monkeypatch):
    run, taken = ready("fedavg"), []
    phases, original = first_phases(run, 0), BaseStep.single_step
    graphs = GraphRunner(run.world.net, EagerRecorder())
    graphs.run(phases)  # recording takes steps of its own
    monkeypatch.setattr(BaseStep, "single_step", lambda self, row: (taken.append(row), original(self, row)))
    graphs.run(phases)
    assert len(set(lengths(phases))) > 1
    assert [taken.count(row) for row in range(len(phases))] == sorted((2 * n for n in lengths(phases)), reverse=True)


@pytest.mark.parametrize(("method", "round"), [("fedavg", 0), ("pro", 2)])
def test_nothing_is_read_back_for_any_number_of_groups(ready, monkeypatch, method, round):
    run, ended = ready(method), []
    phases = first_phases(run, round)
    monkeypatch.setattr(recorded, "WIDTH", 2)
    graphs, end = GraphRunner(run.world.net, EagerRecorder()), StaticStep.end
    expected = graphs.run(phases)
    monkeypatch.setattr(StaticStep, "end", lambda self, *a: (ended.append("group"), end(self, *a))[1])
    with host_forbidden():
        done = graphs.run(phases)
    assert len(ended) == (1 if phases[0].on_features else -(-len(phases) // 2))
    assert apart(expected, done) == 0.0


@pytest.mark.parametrize(("method", "round"), [("fedavg", 0), ("pro", 2)])
def test_the_largest_values_show_which_clients_have_nan_or_infinity(ready, method, round):
    run = ready(method)
    phases = first_phases(run, round)
    head = {k: torch.full_like(v, torch.inf) for k, v in phases[1].weights["head"].items()}
    phases[1] = replace(phases[1], weights={**phases[1].weights, "head": head})
    done = GraphRunner(run.world.net, EagerRecorder()).run(phases)
    assert [math.isfinite(d.max_abs) for d in done] == [i != 1 for i in range(len(phases))]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_gpu_clients_draw_together(ready, monkeypatch, device):
    """What they draw is tested in tests/accel/test_joined_rehearsal.py; here, on which devices it is used."""
    phases = first_phases(ready("pro", fit_when_frozen="false", base_rounds=0, quota=30), 0)
    drawn = SimpleNamespace(steps=[3, 2], epoch=lambda rngs: {"y": torch.zeros(2, 3, BATCH)})
    found = []
    monkeypatch.setattr(sources, "JoinedRehearsal", lambda given, batch: (found.append((given, batch)), drawn)[1])
    if device == "cpu":
        rngs: Any = [torch.Generator() for _ in phases]
        longest_first = sorted(phases, key=lambda p: -p.length)
        assert [steps for _, steps in sources.epochs(longest_first, rngs)] == [[p.length for p in longest_first]] * 2
        assert not found
    else:
        rngs = [SimpleNamespace(device=SimpleNamespace(type=device)) for _ in phases]
        assert [steps for _, steps in sources.epochs(phases, rngs)] == [[3, 2]] * 2
        assert found == [([p.source for p in phases], BATCH)]


def test_stacks_have_unequal_epochs_and_more_steps_than_the_table(ready):
    run = ready("pro")
    phases = first_phases(run, 2)
    assert len(set(lengths(phases))) > 1 and max(lengths(phases)) > CHUNK
    graphs = GraphRunner(run.world.net, EagerRecorder())
    done = graphs.run(phases)
    assert [d.steps for d in done] == [2 * n for n in lengths(phases)]


def test_a_stack_that_moves_only_the_head_leaves_the_adapter(ready):
    run = ready("pro", base_rounds=0)
    phases = [replace(p, blocks=("head",)) for p in first_phases(run, 0)]
    done = GraphRunner(run.world.net, EagerRecorder()).run(phases)
    assert apart(eagerly(run.world.net, phases), done) < 1e-6
    assert all(d.weights["adapter"] is p.weights["adapter"] for d, p in zip(done, phases, strict=True))


def test_inactive_rows_do_not_change_even_beside_nan():
    for rule in RULES:
        rng = torch.Generator().manual_seed(0)
        matrix = torch.randn(3, 5, generator=rng)
        masked = MaskedUpdate(TrainSettings(**rule), matrix)
        masked.step(torch.randn(3, 5, generator=rng), torch.tensor([True, True, False]))
        before = [t.clone() for t in (matrix, masked.first, masked.second, masked.times)]
        g = torch.randn(3, 5, generator=rng)
        g[1:] = float("nan")
        masked.step(g, torch.tensor([True, False, False]))
        for now, then in zip((matrix, masked.first, masked.second, masked.times), before, strict=True):
            assert torch.equal(now[1:], then[1:])
        assert matrix.isfinite().all() and not torch.equal(matrix[0], before[0][0])


# -- buffers and recordings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro", "promax"])
def test_a_whole_run_replays_a_few_steps_whose_buffers_stay_where_they_are(fresh, max_difference, method):
    eager, replayed = (fresh(method, **UNEVEN) for _ in range(2))
    graphs = replaying(replayed)
    at: dict[tuple, list[int]] = {}
    for position, round in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        for run in (eager, replayed):
            run.play(position, round)
        for key, step in graphs.known.items():
            assert at.setdefault(key, addresses(step)) == addresses(step)
    assert max_difference(eager.server, replayed.server) < 1e-4
    assert 1 <= len(graphs.known) <= 3
    assert graphs.recordings == sum(len(step.recordings) for step in graphs.known.values())


def test_a_loss_that_runs_the_starting_model_replays_too(fresh, max_difference):
    eager, replayed = (fresh("hr", **(UNEVEN | {"all_seen": False})) for _ in range(2))
    graphs = replaying(replayed)
    for position, round in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for run in (eager, replayed):
            if (position, round) == (1, 0):
                run.state.server = run.method.end_position(run.server, run.when(0, 1))
            run.play(position, round)
    assert max_difference(eager.server, replayed.server) < 1e-4
    assert graphs.recordings and not graphs.eager


def test_a_recording_keeps_nothing_of_the_phase_it_was_made_for(ready):
    run = ready("pro")
    graphs = GraphRunner(run.world.net, EagerRecorder())
    for round in (0, 2):
        graphs.run(first_phases(run, round))
    for step in graphs.known.values():
        assert not step.template.weights and not step.template.constants and not step.template.source.size


def otherwise(net: Any, batch: dict[str, Any]) -> Tensor:
    logits = net(*net.weak(batch["inputs"], batch["rng"]))
    return 0.5 * cross_entropy(logits, batch["y"], batch["allowed"])


def test_steps_that_move_the_same_tensors_share_their_memory(ready):
    run = ready("fedavg")
    net, phases = run.world.net, first_phases(run, 0)
    others, pulled = ([replace(p, **more) for p in phases] for more in ({"loss": otherwise}, {"proximal": 0.1}))
    graphs = GraphRunner(net, EagerRecorder())
    for _ in range(2):  # in turn, so that each starts from the memory that another has used
        for kind in (phases, others, pulled):
            assert apart(graphs.run(kind), eagerly(net, kind)) < TOLERANCE
    one, two, three = (step.models for step in graphs.known.values())
    assert one is two and one is not three and len(graphs.models) == 2
    del one, two, three
    graphs.clear()
    assert not graphs.known and not graphs.models
    assert apart(graphs.run(phases), eagerly(net, phases)) < TOLERANCE


def test_steps_with_several_views_have_smaller_groups(ready, monkeypatch):
    monkeypatch.setattr(recorded, "WIDTH", 2)
    monkeypatch.setattr(recorded, "NARROW", 1)
    for method, most in (("fedavg", 2), ("pro", 1)):
        run = ready(method)
        phases, graphs = first_phases(run, 0), GraphRunner(run.world.net, EagerRecorder())
        assert len(phases) > most and ("projector" in phases[0].blocks) == (method == "pro")
        assert apart(graphs.run(phases), eagerly(run.world.net, phases)) < TOLERANCE
        (step,) = graphs.known.values()
        assert max(rows for rows, _ in step.recordings) == len(step.models.nets) == most


class LittleMemory(EagerRecorder):
    """A recorder without memory for steps of many clients."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.asked = limit, []

    def record(self, step: Any, rows: int, warm: Any = None) -> Any:
        self.asked.append(rows)
        if rows > self.limit:
            step()  # the error occurs during a step
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return super().record(step, rows, warm)


def test_out_of_memory_leads_to_smaller_groups(ready, monkeypatch):
    monkeypatch.setattr(recorded, "WIDTH", 4)
    run = ready("fedavg")
    phases, recorder = first_phases(run, 0), LittleMemory(1)
    graphs = GraphRunner(run.world.net, recorder)
    with pytest.warns(UserWarning, match="too small for . clients at a time: now .") as raised:
        done = graphs.run(phases)
    assert len(raised) == 2
    assert apart(done, GraphRunner(run.world.net, EagerRecorder()).run(phases)) == 0.0
    assert graphs.most == 1 and sorted(set(recorder.asked)) == [1, 2, len(phases)] == [1, 2, 3]
    assert all(len(step.models.nets) == 1 for step in graphs.known.values())
    recorder.asked.clear()
    graphs.run(phases)
    assert not recorder.asked  # later phases use the smaller groups at once


def test_out_of_memory_for_one_client_is_an_error(ready, monkeypatch):
    run = ready("fedavg")
    phases, graphs = first_phases(run, 0), GraphRunner(run.world.net, LittleMemory(0))
    with (
        pytest.warns(UserWarning, match="too small"),
        pytest.raises(Failure, match=r"too small for the step of phase 'fit' \(CUDA out of memory.\); free"),
    ):
        graphs.run(phases)


def test_a_warm_up_leaves_no_recordings_behind(fresh):
    run = fresh("fedavg", warmup__rounds=1)
    graphs = replaying(run)
    compute(run.world, lambda *_: None)
    assert graphs.recordings and not graphs.known and not graphs.models


def test_recordings_are_bounded_and_the_oldest_go_first(ready, monkeypatch):
    monkeypatch.setattr(static_steps, "UNROLL", (1,))  # one recording a step
    monkeypatch.setattr(recorded, "MAX_CACHED", 2)
    monkeypatch.setattr(recorded, "MOST", 4)
    run = ready("pro")
    graphs, phase = GraphRunner(run.world.net, EagerRecorder()), first_phases(run, 0, epochs=1)[0]
    for proximal in (0.1, 0.2, 0.3):
        graphs.run([replace(phase, proximal=proximal)])
    assert [key[3] for key in graphs.known] == [0.2, 0.3]
    graphs.run([replace(phase, proximal=0.2)])
    graphs.run([replace(phase, proximal=0.4)])
    assert [key[3] for key in graphs.known] == [0.2, 0.4]
    last = replace(phase, proximal=0.5)
    with pytest.warns(UserWarning, match="eagerly"):
        assert apart(graphs.run([last]), one_by_one(run.world.net, [last])) == 0
    assert graphs.recordings == 4


def test_several_steps_are_recorded_as_one_once_enough_were_taken(ready, monkeypatch):
    monkeypatch.setattr(static_steps, "UNROLL_AFTER", 20)
    run = ready("fedavg")
    graphs, (phase, *_) = GraphRunner(run.world.net, EagerRecorder()), first_phases(run, 0, epochs=2)
    eager = one_by_one(run.world.net, [phase])
    taken, found = 0, []
    for _ in range(6):
        assert apart(eager, graphs.run([phase])) < TOLERANCE
        (step,) = graphs.known.values()
        found.append(((1, 2) in step.recordings, taken >= 20))
        taken += 2 * phase.length
    assert found[0] == (False, False) and found[-1] == (True, True) and all(a == b for a, b in found)


@pytest.mark.parametrize("length, recorded", [(10, {5}), (12, {4}), (9, {3}), (11, {5, 1}), (2, {1}), (61, {5, 1})])
def test_an_epoch_is_replayed_in_recordings_that_fit_it(monkeypatch, length, recorded):
    monkeypatch.setattr(static_steps, "UNROLL", (5, 4, 3))
    monkeypatch.setattr(static_steps, "CHUNK", 60)
    step = BaseStep.__new__(BaseStep)
    step.unroll, step.unrolled = static_steps.unroll(length), {2}
    course = list(step.recording_sequence([length, length]))
    assert {steps for _, (_, steps) in course} == recorded and {rows for _, (rows, _) in course} == {2}
    assert [number for number, _ in course] == [sum(n for _, (_, n) in course[:i]) for i in range(len(course))]
    assert sum(steps for _, (_, steps) in course) == length
    assert all(number // 60 == (number + steps - 1) // 60 for number, (_, steps) in course)


# -- what stays eager -------------------------------------------------------------------------------------------------


def test_full_batches_and_losses_made_for_one_phase_are_not_recorded(ready):
    run = ready("pro")
    phase = first_phases(run, 0)[0]
    factor = torch.tensor(2.0)
    assert policy.recordable(phase)
    assert not policy.recordable(replace(phase, settings=replace(phase.settings, batch=0)))
    assert not policy.recordable(replace(phase, loss=lambda net, batch: factor * run.method.fit_loss(net, batch)))


def test_inputs_that_are_not_one_row_an_example_run_eagerly(ready):
    """As for graphs, where every batch has all nodes and edges of the client."""
    run = ready("fedavg")
    (phase, *_), net = first_phases(run, 0, epochs=1), run.world.net
    examples = phase.inputs.__self__
    around = replace(phase, inputs=lambda index: (examples.x, index), loss=loss_with_surroundings)
    graphs = GraphRunner(net, EagerRecorder())
    assert apart(graphs.run([around]), one_by_one(net, [around])) == 0
    assert graphs.recordings == 0


def loss_with_surroundings(net: Any, batch: Any) -> Tensor:
    x, index = batch["inputs"]
    return cross_entropy(net(x[index]), batch["y"], batch["allowed"])


def test_on_a_cpu_nothing_is_recorded_unless_asked_for(ready):
    assert ready("fedavg").world.executor.acceleration.graphs is None


def test_a_step_that_cannot_be_recorded_says_what_to_do(ready):
    class Broken(EagerRecorder):
        def record(self, step: Any, rows: int, warm: bool = True) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    run = ready("fedavg")
    with pytest.raises(Exception, match="accelerate=off"):
        GraphRunner(run.world.net, Broken()).run(first_phases(run, 0))


# -- precision and layout ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_channels_last_weights_are_updated_like_any_others(ready, rule):
    run = ready("fedprox")
    phases, net = first_phases(run, 0, rule), copy.deepcopy(run.world.net)
    usual = one_by_one(net, phases)
    net.base.to(memory_format=torch.channels_last)
    assert any(not p.is_contiguous() for p in net.base.parameters())
    assert apart(usual, one_by_one(net, phases)) < 1e-4
    assert apart(usual, GraphRunner(net, Strict()).run(phases)) < 1e-4


def test_bf16_trains_the_base_in_bfloat16_and_everything_else_in_float32(ready):
    run = ready("pro")
    net, base, tail = copy.deepcopy(run.world.net), first_phases(run, 0), first_phases(run, 2)
    exact = one_by_one(net, base), eagerly(net, tail)
    Executor(net, precision="bf16")
    rough = one_by_one(net, base), eagerly(net, tail)
    assert 1e-4 < apart(exact[0], rough[0]) < 0.2
    assert apart(exact[1], rough[1]) == 0
    assert all(t.dtype == torch.float32 for r in rough[0] for ts in r.weights.values() for t in ts.values())
    assert apart(rough[0], GraphRunner(net, Strict()).run(base)) < TOLERANCE
    assert not run.world.net.bf16  # on a CPU only when asked for


def test_in_a_row_filters_are_adjacent_and_blocks_with_a_proximal_term_are_first():
    sizes = {"generator": (4, 2), "base": (4, 2, 4), "head": (2,)}  # axes of their tensors
    tensors = {(b, str(i)): torch.randn([2] * n) for b, axes in sizes.items() for i, n in enumerate(axes)}
    row = FlatLayout(sorted_for_row(tensors))
    blocks, axes = [b for b, _ in row.places], [len(shape) for shape, _, _ in row.places.values()]
    assert blocks == ["base", "head", "base", "base", "generator", "generator"] and axes == [2, 2, 4, 4, 4, 2]
    assert row.filters() == slice(8, 8 + 3 * 16)
    assert FlatLayout({at: t for at, t in tensors.items() if t.dim() == 2}).filters() == slice(12, 12)


def test_rows_of_any_length_are_aligned_for_the_kernels():
    layout = FlatLayout({("base", "filters"): torch.zeros(8, 1, 3, 3), ("decoder", "bias"): torch.zeros(3)})
    low = layout.matrix(torch.zeros(4, dtype=torch.bfloat16))
    assert low.shape == (4, 75)
    assert all(row.data_ptr() % 16 == 0 for row in low)


@pytest.mark.parametrize("method", ["fedavg", "hr"])
def test_the_filters_of_every_client_are_aligned(fresh, method):
    run = fresh(method, **(UNEVEN | {"all_seen": False}), model__encoder="resnet18", model__width=8)
    run.world.net.set_precision("bf16")
    graphs = replaying(run)
    run.play(0, 0)
    nets = [net for models in graphs.models.values() for net in models.nets]
    filters = [p for net in nets for p in net.parameters() if p.dtype == torch.bfloat16]
    assert len(nets) > 1 and filters
    assert all(p.data_ptr() % 16 == 0 for p in filters)


def test_gradients_are_copied_into_the_order_of_their_row():
    last, small = (torch.randn(shape).to(memory_format=torch.channels_last) for shape in ((5, 3, 2, 2), (5, 3, 1, 1)))
    layout = FlatLayout({("base", "wide"): last, ("base", "small"): small})
    row = torch.zeros(layout.size)
    for grads in ([last, small], [last.contiguous(), small.contiguous()]):
        torch.cat(layout.flat(grads), out=row)
        assert all(torch.equal(*pair) for pair in zip(layout.views(row).values(), grads, strict=True))
    assert layout.flat([last, small])[0].data_ptr() == last.data_ptr()
    assert all(v.dtype == torch.bfloat16 for v in layout.views(row, row.bfloat16()).values())


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("proximal", [0.0, 0.3])
def test_gradients_of_filters_in_bfloat16_give_the_update_of_a_float32_row(rule, proximal):
    rng, filters = torch.Generator().manual_seed(0), slice(3, 8)
    start, anchor, grad = (torch.randn(n, generator=rng) for n in (10, 6, 10))
    grad[filters] = grad[filters].bfloat16().float()
    phase: Any = SimpleNamespace(settings=TrainSettings(**rule), proximal=proximal)
    apart = grad.clone()
    apart[filters] = torch.nan
    rows = []
    for grads in ((grad.clone(), None), (apart, grad.bfloat16())):
        rows.append(start.clone())
        Update(phase, rows[-1], torch.zeros(10).bfloat16(), anchor if proximal else None, filters).step(*grads)
    assert torch.equal(*rows) and not torch.equal(rows[0], start)
