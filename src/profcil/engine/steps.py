"""The reference way to run a training phase: one client, one step after another, by autograd.

A step is: loss, gradient, proximal term, clipping, update. Faster ways (`accel`) give the same results up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from profcil.engine.optim import Optimiser, clip_
from profcil.engine.phases import Batch, Train, Trained, batch_rows
from profcil.model.net import MODEL, TAIL, Net, Tail, Weights


def run(net: Net, phase: Train) -> Trained:
    """Trains the blocks of a phase from its weights."""
    return train_features(net, phase) if phase.on_features else train_net(net, phase)


def train_net(net: Net, phase: Train) -> Trained:
    """A phase that trains the base: weights are loaded into the module and trained in place."""
    net.load(phase.weights)
    parameters, pulled = unfreeze(net, phase.blocks)
    loss, steps = train(net, phase, net, parameters, pulled)
    return Trained({**phase.weights, **net.weights(phase.blocks)}, loss, steps)


def train_features(net: Net, phase: Train) -> Trained:
    """A phase on features: copies of adapter and head are trained."""
    tensors: Weights = {}
    for block in TAIL:
        tensors[block] = {name: t.clone() for name, t in phase.weights[block].items()}
    parameters = [t.requires_grad_() for block in phase.blocks for t in tensors[block].values()]
    tail = Tail(tensors["adapter"], tensors["head"], net.cosine)
    loss, steps = train(net, phase, tail, parameters, parameters)
    weights = dict(phase.weights)
    for block in phase.blocks:
        weights[block] = {name: t.detach() for name, t in tensors[block].items()}
    return Trained(weights, loss, steps)


def train(
    net: Net, phase: Train, model: Net | Tail, parameters: Sequence[Tensor], pulled: Sequence[Tensor]
) -> tuple[float, int]:
    """All epochs of a phase, in place. Returns the mean loss of the last epoch and the number of steps."""
    anchor = [p.detach().clone() for p in pulled] if phase.proximal else None
    optimiser = Optimiser(phase.settings, parameters)
    rng = generator_of(net, phase)
    losses: list[Tensor] = []
    for _ in range(phase.epochs):
        losses = []
        for batch in batches(phase, rng):
            losses.append(step(model, parameters, phase, batch, optimiser, anchor))
    return float(torch.stack(losses).mean()), optimiser.time


def batches(phase: Train, rng: torch.Generator) -> Iterator[Batch]:
    """One shuffled epoch."""
    rows = phase.source.epoch(rng)
    for index in batch_rows(phase.source, phase.settings.batch, rng):
        batch: Batch = {name: tensor[index] for name, tensor in rows.items()}
        batch |= phase.constants
        batch["rng"] = rng
        if phase.inputs is not None:
            batch["inputs"] = phase.inputs(batch["index"])
        yield batch


def step(
    model: Net | Tail,
    parameters: Sequence[Tensor],
    phase: Train,
    batch: Batch,
    optimiser: Optimiser,
    anchor: list[Tensor] | None,
) -> Tensor:
    """One step in place. Returns its loss."""
    loss = loss_of(model, phase, batch)
    grads = list(torch.autograd.grad(loss.sum(), parameters, materialize_grads=True))
    if anchor is not None:  # ∇ λ‖Θ − Θ^g‖² = 2λ(Θ − Θ^g)
        pulled = [p.detach() for p in parameters[: len(anchor)]]
        differences = torch._foreach_sub(pulled, anchor)
        torch._foreach_add_(grads[: len(anchor)], differences, alpha=2 * phase.proximal)
    clip_(grads, phase.settings.clip)
    optimiser.step(grads)
    return loss.detach()


def loss_of(model: Net | Tail, phase: Train, batch: Batch) -> Tensor:
    """The phase's loss in the model's precision. On features everything stays in float32."""
    if not isinstance(model, Net) or not model.bf16:
        return phase.loss(model, batch)
    with model.autocast():  # in each step, because autocast caches the cast weights until it ends
        return phase.loss(model, batch)


def unfreeze(net: Net, blocks: Sequence[str]) -> tuple[list[Parameter], list[Parameter]]:
    """Prepares the module for training these blocks. Returns their parameters, and those of them that the proximal term
    acts on. These come first; the projector is not among them."""
    net.train()
    net.requires_grad_(False)
    parameters = net.trainable(blocks)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters, net.trainable([b for b in blocks if b in MODEL])


def generator_of(net: Net, phase: Train) -> torch.Generator:
    """The phase's random generator, on the model's device."""
    return torch.Generator(device=net.device).manual_seed(phase.seed)
