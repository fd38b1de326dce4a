"""Training with noise on gradients (DP-SGD; Abadi et al., 2016): each step hides every example of the client.

A step takes each example with the same small chance, clips the gradient of each to a length C, adds noise of deviation
z·C to their sum, and divides by the batch size of the settings, which does not depend on the data. An epoch has as many
steps as take an example once on average. What follows from the steps, the model update, needs no further noise. The
loss would be exact, and is not computed. An example whose gradient is not finite adds nothing.

Samples, views and noise are drawn from a secret number and a digest of all that the gradients depend on. So the same
turn, asked for again, has the same noise and reveals nothing more; any other turn has noise of its own. Views must be
secret, too: with one example more, the views of all others are drawn anew.

The gradient of one example must exist: BatchNorm mixes examples, and so do graphs. Gradients are computed by torch.func
and not by hooks on modules (as Opacus has them), since adapter and head of the model are functions of their tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from profcil.config import TrainSettings
from profcil.data.bundle import Inputs
from profcil.engine.phases import Batch, GradientNoise, Train, Trained
from profcil.engine.steps import Optimiser, clip_, unfreeze
from profcil.errors import ConfigError
from profcil.model.net import Net
from profcil.privacy.accountant import epsilon_of_steps, multiplier_of_steps
from profcil.privacy.settings import PrivacySettings
from profcil.randomness import generator

CHUNK = 64  # examples whose gradients are in memory at the same time
Gradients = dict[str, Tensor]


def steps_of_epoch(sampling: float) -> int:
    """The steps in which an example is taken once on average."""
    return max(1, round(1 / sampling))


def steps_of_turn(settings: PrivacySettings, train: TrainSettings) -> int:
    """The noised steps of a client's turn."""
    return train.epochs * steps_of_epoch(settings.sampling)


def noise_for(settings: PrivacySettings, train: TrainSettings, turns: float) -> float:
    """The noise multiplier with which so many turns of a client end at ε."""
    steps = max(1, round(turns * steps_of_turn(settings, train)))
    found = multiplier_of_steps(settings.epsilon, settings.delta, steps, settings.sampling)
    least = epsilon_of_steps(found, settings.delta, steps, settings.sampling)
    if least > settings.epsilon * (1 + 1e-6):
        raise ConfigError(
            f"with privacy.sampling = {settings.sampling:g} no ε below {least:.2g} can be accounted for; give a larger "
            "privacy.epsilon, or privacy.sampling = 1"
        )
    return found


def train_privately(net: Net, phase: Train) -> Trained:
    """Trains the blocks of a phase with noise on its gradients. The loss that is returned is none."""
    noise = phase.noise
    assert noise is not None
    net.load(phase.weights)
    _, pulled = unfreeze(net, phase.blocks)
    parameters = named_parameters(net, phase.blocks)
    anchor = [p.detach().clone() for p in pulled]
    optimiser = Optimiser(phase.settings, list(parameters.values()))
    rows = phase.source.epoch(torch.Generator(device=net.device))
    secret = generator(noise.secret, "gradients", phase.seed, digest(phase, rows))
    for _ in range(phase.epochs * steps_of_epoch(noise.sampling)):
        taken = torch.from_numpy(secret.random(phase.source.size) < noise.sampling)
        index = torch.nonzero(taken).flatten().to(net.device)
        views = torch.Generator(device=net.device).manual_seed(int(secret.integers(1 << 62)))
        total = clipped_sum(net, parameters, phase, rows, index, views)
        grads = noised_mean(total, noise, phase.settings.batch, secret)
        pull_(grads[: len(anchor)], pulled, anchor, phase.proximal)
        clip_(grads, phase.settings.clip)
        optimiser.step(grads)
    return Trained({**phase.weights, **net.weights(phase.blocks)}, 0.0, optimiser.time)


def named_parameters(net: Net, blocks: tuple[str, ...]) -> dict[str, torch.nn.Parameter]:
    """The parameters of some blocks, by their names in the model and in the order of `net.trainable`."""
    return {f"{block}.{name}": p for block in blocks for name, p in getattr(net, block).named_parameters()}


def clipped_sum(
    net: Net,
    parameters: Mapping[str, Tensor],
    phase: Train,
    rows: Mapping[str, Tensor],
    index: Tensor,
    rng: torch.Generator,
) -> Gradients:
    """The sum of the clipped gradients of these examples."""
    assert phase.noise is not None
    values = {name: p.detach() for name, p in parameters.items()}
    total = {name: torch.zeros_like(p) for name, p in values.items()}
    of_each = vmap(grad(loss_of_one(net, phase)), in_dims=(None, 0, 0))
    for chunk in index.split(CHUNK) if len(index) else ():
        inputs = phase.inputs(rows["index"][chunk]) if phase.inputs else ()
        views = net.weak(inputs, rng)
        grads = of_each(values, views, {name: t[chunk] for name, t in rows.items()})
        norms = norms_of(grads)
        shortened = (phase.noise.bound / norms.clamp(min=1e-30)).clamp(max=1.0)
        factors = torch.where(norms.isfinite(), shortened, 0.0)
        for name, g in grads.items():
            total[name] += torch.tensordot(factors, g.nan_to_num(0.0, 0.0, 0.0), dims=1)
    return total


def loss_of_one(net: Net, phase: Train) -> Callable[[Gradients, Inputs, Mapping[str, Tensor]], Tensor]:
    """The loss of one example under given parameters, as a function for torch.func."""

    def loss(parameters: Gradients, views: Inputs, row: Mapping[str, Tensor]) -> Tensor:
        batch: Batch = {name: t.unsqueeze(0) for name, t in row.items()}
        batch |= {**phase.constants, "inputs": tuple(v.unsqueeze(0) for v in views), "rng": None}
        value: Tensor = phase.loss(Augmented(net, parameters), batch)
        return value

    return loss


@dataclass(frozen=True)
class Augmented:
    """The model under given parameters, for inputs that are augmented already."""

    net: Net
    parameters: Gradients

    def weak(self, inputs: Inputs, rng: Any) -> Inputs:
        return inputs

    def __call__(self, *inputs: Tensor) -> Tensor:
        logits: Tensor = functional_call(self.net, self.parameters, inputs)
        return logits


def norms_of(grads: Gradients) -> Tensor:
    """The Euclidean norm of the gradient of each example, over all parameters."""
    by_tensor = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(by_tensor), dim=0)
    return norms


def noised_mean(total: Gradients, noise: GradientNoise, batch: int, secret: np.random.Generator) -> list[Tensor]:
    """The sum with noise, over the batch size. Noise is drawn on the CPU: the same on every device."""
    deviation = noise.multiplier * noise.bound
    noised = []
    for t in total.values():
        drawn = torch.from_numpy(np.asarray(secret.standard_normal(tuple(t.shape)))) * deviation
        noised.append(((t.double() + drawn.to(t.device)) / batch).to(t.dtype))
    return noised


def pull_(grads: list[Tensor], parameters: list[Any], anchor: list[Tensor], proximal: float) -> None:
    """Adds the gradient of the proximal term, which does not depend on the data."""
    if proximal:
        torch._foreach_add_(grads, torch._foreach_sub([p.detach() for p in parameters], anchor), alpha=2 * proximal)


def digest(phase: Train, rows: Mapping[str, Tensor]) -> str:
    """A digest of what a client trains on and how: what it was sent, its examples, and the settings."""
    assert phase.noise is not None
    total = hashlib.blake2b(digest_size=16)
    how = (phase.settings, phase.blocks, phase.proximal, replace(phase.noise, secret=0))
    total.update(repr(how).encode())

    def add(name: str, tensor: Tensor) -> None:
        total.update(f"{name} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().numpy().tobytes())

    for block, tensors in sorted(phase.weights.items()):
        for name, tensor in sorted(tensors.items()):
            add(f"{block} {name}", tensor)
    for name, tensor in sorted({**phase.constants, **rows}.items()):
        add(name, tensor)
    if phase.inputs:
        for chunk in rows["index"].split(CHUNK):
            for tensor in phase.inputs(chunk):
                add("inputs", tensor)
    return total.hexdigest()
