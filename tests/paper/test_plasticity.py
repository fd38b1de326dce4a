"""Proposition (proximal control of local drift): ‖Θ_c − Θ^g‖ ≤ (G + ξ) / 2λ, and no base drift when it is frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from profcil.engine import steps
from profcil.engine.client import embed
from profcil.engine.phases import Features, Train
from profcil.model.losses import cross_entropy
from profcil.model.net import MODEL, TAIL, Tail

FULL_BATCH_SGD = {"batch": 0, "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0, "optimiser": "sgd"}


def phase_of(run, blocks: tuple[str, ...], strength: float, epochs: int) -> Train:
    """Fitting of one client on twelve examples by full-batch descent, so that it converges."""
    client = run.client(run.clients(0, 0)[0], 0, 0)
    client.current = client.current[:12]
    client.settings = replace(client.settings, **FULL_BATCH_SGD)
    weights = run.server.weights()
    allowed = torch.ones(10, dtype=torch.bool)
    if blocks == MODEL:
        return client.train(
            "fit", weights, MODEL, run.method.fit_loss, proximal=strength, epochs=epochs, allowed=allowed
        )
    source = Features(embed(client.net, weights["base"], client.examples, client.current), client.y)
    return client.train(
        "fit", weights, TAIL, run.method.tail_loss, source, proximal=strength, epochs=epochs, allowed=allowed
    )


def gradient_of(run, phase: Train, weights: dict) -> torch.Tensor:
    """∇F over the trainable blocks, without the proximal term."""
    net = run.world.net
    net.load(weights)
    net.train()
    for p in net.parameters():
        p.requires_grad_(True)
    rows = phase.source.epoch(torch.Generator())
    if phase.blocks == MODEL:
        logits = net(*phase.inputs(rows["index"]))
    else:
        logits = Tail(net.adapter, net.head).classify(rows["u"])
    loss = cross_entropy(logits, rows["y"], phase.constants["allowed"])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, net.trainable(phase.blocks))])


def vector(run, weights: dict, blocks: tuple[str, ...]) -> torch.Tensor:
    run.world.net.load(weights)
    return torch.cat([p.detach().flatten().clone() for p in run.world.net.trainable(blocks)])


@pytest.mark.parametrize("strength", [0.5, 2.0])
@pytest.mark.parametrize("blocks", [TAIL, MODEL], ids=["tail", "model"])
def test_a_proximal_fit_stays_within_the_bound(fresh, blocks, strength):
    run = fresh("pro", train__augment=False)
    phase = phase_of(run, blocks, strength, epochs=200)
    start = run.server.weights()
    done = steps.run(run.world.net, phase)
    drift = vector(run, done.weights, blocks) - vector(run, start, blocks)
    gradient = gradient_of(run, phase, done.weights)
    g = float(gradient.norm())
    xi = float((gradient + 2 * strength * drift).norm())
    assert xi < 0.05 * g  # the engine minimises F + λ‖Π(Θ) − Π(Θ^g)‖², so the result is nearly stationary
    assert float(drift.norm()) <= (g + xi) / (2 * strength) + 1e-6
    assert float(drift.norm()) > 0.5 * g / (2 * strength)  # the bound is not vacuous


def test_a_stronger_proximal_term_means_less_drift(fresh):
    run = fresh("pro", train__augment=False)
    start = run.server.weights()
    moved = []
    for strength in (0.0, 0.1, 1.0, 5.0):
        done = steps.run(run.world.net, phase_of(run, MODEL, strength, epochs=30))
        moved.append(float((vector(run, done.weights, MODEL) - vector(run, start, MODEL)).norm()))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.5 * moved[0]


def test_a_frozen_base_does_not_drift(fresh):
    run = fresh("pro", base_rounds=0)
    before = run.server.weights()["base"]
    rows = torch.arange(20)
    features = embed(run.world.net, before, run.world.evaluation_examples, rows)
    after = run.play(0, 0)
    assert torch.equal(embed(run.world.net, after.weights()["base"], run.world.evaluation_examples, rows), features)
    assert after.blocks["base"].version == 1  # it was not replaced
