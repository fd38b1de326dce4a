"""Captured steps against eager ones on a real GPU, for every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from profcil.accel import stacked_heads
from profcil.accel.cuda_graphs import static_steps
from profcil.accel.cuda_graphs.recorder import GraphRecorder
from profcil.accel.cuda_graphs.runner import GraphRunner
from profcil.accel.cuda_graphs.static_steps import FusedHeadStep, StaticStep
from profcil.accel.cuda_graphs.updates import FusedMaskedUpdate, FusedUpdate, MaskedUpdate, Update
from profcil.accel.net import install
from profcil.config import TrainSettings
from profcil.engine import steps
from profcil.engine.phases import Train, Trained
from profcil.model.net import Net

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

SETTINGS = {
    "device": "cuda",
    "setting": "homogeneous",
    "dirichlet": 0.5,
    "all_seen": True,
    "warmup__rounds": 0,
    "train__batch": 16,
    "train__epochs": 2,
    "model__width": 16,
    "lr": 0.01,
}
RULES = [
    {"optimiser": "sgd"},
    {"optimiser": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0},
    {"optimiser": "adam"},
    {"optimiser": "adam", "decay": "coupled", "weight_decay": 0.1},
]
FLOAT32, BF16 = 1e-4, 2e-2  # tolerances; the kernels are the same, their sums may be taken in another order


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Full float32 products and the same algorithms every time, so that a difference is due to this package."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture(params=["float32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


def first_phases(run: Any, round: int, rule: dict[str, Any]) -> list[Train]:
    """The first phases of a round's participants, from the run's present state."""
    names = run.method.broadcast(run.server, run.when(0, round))
    inbox = {n: run.server.blocks[n] for n in names}
    phases = [next(run.method.turn(run.client(c, 0, round), inbox)) for c in run.clients(0, round)]
    return [replace(p, settings=replace(p.settings, **rule)) for p in phases]


def set_precision(net: Net, precision: str) -> None:
    net.set_precision(precision)
    install(net)


def eagerly(net: Net, phases: list[Train]) -> list[Trained]:
    """Adapters and heads without a recording: those of several clients in one batch."""
    return stacked_heads.run(net, phases) if len(phases) > 1 else [steps.run(net, phases[0])]


def apart(one: list[Trained], two: list[Trained]) -> float:
    gaps = [abs(a.loss - b.loss) for a, b in zip(one, two, strict=True)]
    for a, b in zip(one, two, strict=True):
        gaps += [float((v - b.weights[k][n]).abs().max()) for k, ts in a.weights.items() for n, v in ts.items()]
    return max(gaps)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading anything back from the device during an epoch of replays is an error."""
    original = StaticStep.epoch

    def epoch(self: StaticStep, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            original(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StaticStep, "epoch", epoch)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "pro"])
def test_a_captured_step_of_the_base_agrees_with_the_eager_one(fresh, unread, method, rule, precision):
    run = fresh(method, **SETTINGS)
    net, phases = run.world.net, first_phases(run, 0, rule)
    set_precision(net, precision)
    eager, graphs = [steps.run(net, p) for p in phases], GraphRunner(net, GraphRecorder(run.world.device))
    made = set()
    for _ in range(2):
        assert apart(eager, graphs.run(phases)) < (FLOAT32 if precision == "float32" else BF16)
        made.add(graphs.recordings)
    assert len(made) == 1 and len(graphs.known) == 1


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_the_same_phases_give_the_same_bits_every_time(fresh, method):
    """At the width of the paper's network, where convolutions are Triton kernels."""
    run = fresh(method, **{**SETTINGS, "model__width": 64, "train__batch": 64})
    net, phases = run.world.net, first_phases(run, 0, {})
    set_precision(net, "bf16")
    one, *others = (GraphRunner(net, GraphRecorder(run.world.device)).run(phases) for _ in range(5))
    assert all(apart(one, other) == 0 for other in others)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("base_rounds", [0, 2], ids=["rehearse", "fit with a proximal term"])
def test_a_captured_stack_agrees_with_the_eager_one(fresh, unread, base_rounds, rule):
    fit = "true" if base_rounds else "false"
    run = fresh("pro", **SETTINGS, base_rounds=base_rounds, fit_when_frozen=fit, quota=30)
    net, phases = run.world.net, first_phases(run, base_rounds, rule)
    graphs = GraphRunner(net, GraphRecorder(run.world.device))
    for group in (phases, phases[1:], phases[:1], phases):
        assert apart(eagerly(net, group), graphs.run(group)) < FLOAT32
    assert graphs.recordings == 1
    by_kernels = all(isinstance(step, FusedHeadStep) for step in graphs.known.values())
    assert by_kernels == (static_steps._head_kernels() is not None)


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
@pytest.mark.parametrize("pulled", [0, 5_001, 20_000])
@pytest.mark.parametrize(
    "filters", [slice(0, 0), slice(0, 20_000), slice(160, 16_000), slice(33, 8_001), slice(4_096, 4_097)], ids=str
)
def test_the_kernels_of_an_update_do_what_the_plain_one_does(rule, pulled, filters):
    if not FusedUpdate.fits(torch.zeros(1, device="cuda"), TrainSettings(**rule)):
        pytest.skip("needs Triton")
    rng = torch.Generator("cuda").manual_seed(0)
    start, anchor, *gradients = (torch.randn(20_000, generator=rng, device="cuda") for _ in range(4))
    phase: Any = SimpleNamespace(settings=TrainSettings(**rule), proximal=0.3)
    rows, lows = [start.clone(), start.clone()], [start.bfloat16(), start.bfloat16()]
    for made, row, low in zip((Update, FusedUpdate), rows, lows, strict=True):
        update = made(phase, row, low, anchor[:pulled] if pulled else None, filters)
        for gradient in gradients:
            update.step(gradient.clone(), gradient.bfloat16())
    assert torch.allclose(*rows, atol=1e-5)
    assert torch.equal(lows[1], rows[1].bfloat16())


@pytest.mark.parametrize("rule", RULES[:2], ids=str)
@pytest.mark.parametrize("proximal", [0.0, 0.3])
@pytest.mark.parametrize("size", [5_001, 20_000])
def test_the_kernels_of_a_stack_s_update_do_what_the_plain_one_does(rule, proximal, size):
    settings, rng = TrainSettings(**rule), torch.Generator("cuda").manual_seed(0)
    start, *gradients = (torch.randn(3, 20_000, generator=rng, device="cuda") for _ in range(4))
    if not FusedUpdate.fits(start, settings):
        pytest.skip("needs Triton")
    rows = [start.clone(), start.clone()]
    for made, matrix in zip((MaskedUpdate, FusedMaskedUpdate), rows, strict=True):
        update = made(settings, matrix[:, :size], proximal)
        update.reset()
        for done, gradient in enumerate(gradients):
            active = torch.tensor([3, 2, 1], device="cuda") > done
            update.step(gradient[:, :size].masked_fill(~active[:, None], torch.nan).contiguous(), active)
    assert torch.allclose(*rows, atol=1e-5) and not torch.equal(rows[0], start)


def test_replays_draw_what_eager_calls_draw_with_shuffles_in_between():
    device = torch.device("cuda")
    recorder, eager = GraphRecorder(device), torch.Generator(device)
    found = torch.zeros(2, 1000, device=device)

    def draw() -> None:
        found[0].copy_(torch.rand(1000, generator=recorder.generator(0), device=device))
        found[1].copy_(torch.randn(1000, generator=recorder.generator(0), device=device))

    replay = recorder.record(draw, 1)
    for seed in (3, 2**62 + 11):
        recorder.generator(0).manual_seed(seed), eager.manual_seed(seed)
        for _ in range(3):
            shuffles = [torch.randperm(77, generator=g, device=device) for g in (recorder.generator(0), eager)]
            assert torch.equal(*shuffles)
            replay()
            assert torch.equal(found[0], torch.rand(1000, generator=eager, device=device))
            assert torch.equal(found[1], torch.randn(1000, generator=eager, device=device))


@pytest.mark.parametrize("method", ["fedavg", "promax"])
def test_a_run_on_graphs_needs_no_more_memory_with_every_round(fresh, method):
    run = fresh(method, **SETTINGS)
    graphs = run.world.executor.acceleration.graphs
    seen = []
    for position in range(2):
        for round in range(3):
            run.play(position, round)
            run.world.forget_features()
        torch.cuda.synchronize()
        seen.append((graphs.recordings, torch.cuda.memory_allocated()))
    assert seen[0][0] == seen[1][0]  # nothing new is recorded
    assert seen[1][1] < 1.2 * seen[0][1]


def test_an_earlier_recording_that_is_garbage_does_not_invalidate_a_new_one():
    recorder, x = GraphRecorder(torch.device("cuda")), torch.zeros(1000, device="cuda")
    ring: dict[str, Any] = {"replay": recorder.record(lambda: x.add_(torch.ones(1000, device="cuda")), 0)}
    ring["own"] = ring
    del ring

    def step() -> None:
        x.add_(torch.full((1000,), 2.0, device="cuda"))
        assert [[] for _ in range(20_000)]  # enough for a collection
        x.add_(torch.full((1000,), 3.0, device="cuda"))

    x.zero_()
    recorder.record(step, 0)()
    assert x.tolist() == [5.0] * 1000
