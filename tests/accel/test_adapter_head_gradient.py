"""The analytic gradient against autograd, step by step and over a whole phase."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from profcil.accel import policy, stacked_heads
from profcil.accel.acceleration import Acceleration
from profcil.accel.cpu import adapter_head_epoch
from profcil.accel.cpu.adapter_head_gradient import Classification, write_gradients
from profcil.config import TrainSettings
from profcil.data.bundle import Facts
from profcil.engine import steps
from profcil.engine.phases import Batch, Features, Train, Trained
from profcil.model.losses import classification, cross_entropy
from profcil.model.net import TAIL, Net, Tail

WIDTH, CLASSES, ROWS = 12, 7, 30


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(tail: Tail, batch: Batch) -> Tensor:
    return cross_entropy(tail.classify(batch["u"]), batch["y"], batch["allowed"])


def by_formula(net: Net, phase: Train) -> Trained:
    """By the analytic gradient."""
    return adapter_head_epoch.run(phase, steps.generator_of(net, phase))


def net_of(head: str = "linear") -> Net:
    base = nn.Linear(1, 1)
    base.features = WIDTH  # type: ignore[assignment]
    net = Net(base, Facts("toy", "Toy", "text", CLASSES, None, None), head=head, generator=rng())
    with torch.no_grad():
        for block in TAIL:
            for p in getattr(net, block).values():
                p.add_(torch.randn(p.shape, generator=rng(1)) * 0.3)  # so that no parameter is zero
    return net


def rows(count: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    allowed = torch.arange(CLASSES) % 3 != 1
    y = torch.nonzero(allowed).flatten()[torch.randint(0, int(allowed.sum()), (count,), generator=rng(2))]
    return 3 * torch.randn(count, WIDTH, generator=rng(3)) + 1, y, allowed


def phase_of(net: Net, loss, *, proximal: float = 0.0, **train: object) -> Train:
    u, y, allowed = rows()
    settings = TrainSettings(**{"optimiser": "adam", "lr": 0.01, "batch": 8, **train})  # type: ignore[arg-type]
    source, constants = Features(u, y), {"allowed": allowed}
    return Train("rehearse", 0, net.weights(TAIL), TAIL, loss, source, settings, 3, 5, proximal, constants)


def apart(a: Trained, b: Trained) -> float:
    return max(float((a.weights[n][k] - b.weights[n][k]).abs().max()) for n in TAIL for k in a.weights[n])


def test_every_gradient_is_that_of_autograd_and_the_logits_are_kept():
    u, y, allowed = rows()
    order = Classification.order({"allowed": allowed})
    _, tail = adapter_head_epoch.joined(net_of().weights(TAIL), order)
    gradient, into = adapter_head_epoch.joined(net_of().weights(TAIL), order)
    gradient.fill_(torch.nan)  # every number must be overwritten
    analytic = Classification(tail, into, ROWS, {"allowed": allowed})
    write_gradients(analytic.weights, analytic.gradients, analytic.buffers, u, analytic.head_rows[y].unsqueeze(0))
    reference = net_of()
    named = [(block, k) for block in TAIL for k in reference.weights(TAIL)[block]]
    parameters = [getattr(reference, block)[k] for block, k in named]
    expected = plain(reference.tail, {"u": u, "y": y, "allowed": allowed})
    for (block, k), g in zip(named, torch.autograd.grad(expected, parameters), strict=True):
        assert torch.allclose(getattr(into, block)[k], g[order] if block == "head" else g, atol=1e-6), k
    assert torch.equal(into.head["weight"][int(allowed.sum()) :], torch.zeros(2, WIDTH))
    assert torch.allclose(analytic.buffers["logits"].T, reference.classify(u)[:, allowed], atol=1e-5)


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize(
    "train",
    [
        {},
        {"batch": 0},
        {"clip": 0.05},
        {"clip": 0.0},
        {"weight_decay": 0.1},  # which moves classes that are not allowed, too
        {"weight_decay": 0.1, "decay": "coupled"},
        {"optimiser": "sgd", "weight_decay": 0.1},
        {"optimiser": "sgd", "momentum": 0.9},
    ],
)
@pytest.mark.parametrize("in_c", [False, True])
def test_a_phase_with_the_analytic_gradient_ends_where_autograd_ends(proximal, train, in_c, monkeypatch):
    if not in_c:
        monkeypatch.setattr(adapter_head_epoch, "checked_library", lambda: None)
    elif adapter_head_epoch.checked_library() is None:
        pytest.skip("no compiler")
    net = net_of()
    analytic, reference = (phase_of(net, loss, proximal=proximal, **train) for loss in (classification, plain))
    assert policy.way_of(net, [analytic], records=False) == (policy.HEAD_C if in_c else policy.HEAD_SCRIPT)
    assert policy.way_of(net, [reference], records=False) == policy.REFERENCE
    acceleration = Acceleration(net)
    ours, theirs = (acceleration.run([phase])[0] for phase in (analytic, reference))
    assert apart(ours, theirs) < 2e-5 < 1e-3 < apart(ours, Trained(analytic.weights, 0.0, 0))
    assert apart(theirs, steps.run(net, analytic)) == 0
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5) and ours.steps == theirs.steps


@pytest.mark.parametrize("train", [{}, {"optimiser": "sgd"}])
def test_compiled_steps_give_the_bits_of_those_in_python(train, monkeypatch):
    monkeypatch.setattr(adapter_head_epoch, "checked_library", lambda: None)
    net = net_of()
    phase = phase_of(net, classification, proximal=0.1, **train)
    ours = [by_formula(net, phase) for _ in range(3)]  # TorchScript optimises after its first runs
    assert isinstance(adapter_head_epoch.compiled_epoch, torch.jit.ScriptFunction)
    monkeypatch.setattr(adapter_head_epoch, "compiled_epoch", adapter_head_epoch.run_epoch)
    uncompiled = by_formula(net, phase)
    assert all(apart(one, uncompiled) == 0 and one.loss == uncompiled.loss for one in ours)


def test_without_torchscript_the_steps_run_in_python(monkeypatch):
    def no_source(function):
        raise OSError("could not get source code")

    monkeypatch.setattr(torch.jit, "script", no_source)
    assert adapter_head_epoch.torchscript(adapter_head_epoch.run_epoch) is adapter_head_epoch.run_epoch


def test_the_starting_weights_do_not_change():
    net = net_of()
    phase = phase_of(net, classification)
    before = {b: {k: v.clone() for k, v in phase.weights[b].items()} for b in TAIL}
    for run in (by_formula, steps.run):
        run(net, phase)
    assert all(torch.equal(phase.weights[b][k], v) for b in TAIL for k, v in before[b].items())


def test_phases_without_an_analytic_gradient_use_autograd():
    cosine, net = net_of("cosine"), net_of()
    phase = phase_of(net, classification)
    assert policy.has_written_head_gradient(net, phase)
    assert not policy.has_written_head_gradient(cosine, phase_of(cosine, classification))
    assert not policy.has_written_head_gradient(net, replace(phase, blocks=("head",)))
    stacked = stacked_heads.run(net, [phase, replace(phase, client=1)])
    assert apart(stacked[0], by_formula(net, phase)) < 2e-5


def test_a_method_that_uses_the_shared_loss_is_recognised_and_one_with_a_loss_of_its_own_is_not():
    class Parent:
        loss = staticmethod(classification)

    class Child(Parent):
        def loss(self, tail: Tail, batch: Batch) -> Tensor:  # type: ignore[override]
            return 2 * super().loss(tail, batch)

    net = net_of()
    assert policy.has_written_head_gradient(net, phase_of(net, Parent().loss))
    assert not policy.has_written_head_gradient(net, phase_of(net, Child().loss))
