"""The rounds of a stream as plain arrays, which a script outside profcil can compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.bench.peers.rounds import PeerWork
from profcil.data.bundle import Examples
from profcil.engine.channel import Block, When
from profcil.engine.phases import Train, batch_rows
from profcil.engine.steps import generator_of
from profcil.engine.world import World
from profcil.model.net import MODEL, Weights
from profcil.protocol.participation import participants

PLACES = {  # the adapter's tensors as those of ordinary modules
    "scale": "adapt.0.weight",
    "shift": "adapt.0.bias",
    "down": "adapt.1.weight",
    "down_bias": "adapt.1.bias",
    "up": "adapt.3.weight",
    "up_bias": "adapt.3.bias",
}


def export(world: World, method: Any, path: Path) -> None:
    """Writes initial weights, images, and for every round its clients' batches, examples and excluded classes."""
    weights = world.net.weights(MODEL)
    inbox = {name: Block("model", tensors) for name, tensors in weights.items()}
    batches: list[np.ndarray] = []
    samples = []
    excluded = []
    for when in rounds(world):
        phases = []
        for c in participants(world.plan, when.position, when.round):
            phases.append(next(method.turn(world.client(c, when), inbox)))
        batches += [rows_of(world, phase) for phase in phases]
        samples.append([phase.source.size for phase in phases])
        excluded.append((~phases[0].constants["allowed"]).numpy())
    arrays: dict[str, Any] = {f"start/{name}": tensor.numpy() for name, tensor in to_plain(weights).items()}
    arrays |= images_of(world, "", world.bundle.train) | images_of(world, "test_", world.bundle.test)
    arrays |= {"batches": np.concatenate(batches), "starts": np.cumsum([0, *map(len, batches)])}
    arrays |= {"samples": np.array(samples), "excluded": np.array(excluded)}
    np.savez(path, facts=np.array(json.dumps(facts_of(world))), **arrays)


def images_of(world: World, name: str, part: Examples) -> dict[str, np.ndarray]:
    """All images of a part, standardised, and their classes."""
    base: Any = world.net.base
    (images,) = part.inputs(torch.arange(len(part)))
    return {f"{name}x": base.pixels(images).numpy(), f"{name}y": part.y.numpy()}


def rounds(world: World) -> list[When]:
    """All rounds of the stream."""
    count = world.config.train.rounds
    return [When("round", p, r, count) for p in range(world.plan.positions) for r in range(count)]


def rows_of(world: World, phase: Train) -> np.ndarray:
    """The rows of all batches of a phase, drawn as its training draws them."""
    rng = generator_of(world.net, phase)
    epochs = []
    for _ in range(phase.epochs):
        rows = phase.source.epoch(rng)
        epochs.append(rows["index"][batch_rows(phase.source, phase.settings.batch, rng)])
    return torch.cat(epochs).numpy()


def to_plain(weights: Weights) -> dict[str, Tensor]:
    """The tensors of base, adapter and head by their names in `Network`."""
    adapter = {PLACES[name]: tensor for name, tensor in weights["adapter"].items()}
    return {**weights["base"], **adapter, "head.weight": weights["head"]["weight"]}


def facts_of(world: World) -> dict[str, Any]:
    """The sizes of the network and the settings of the optimiser."""
    base: Any = world.net.base
    train = world.config.train
    groups = [base.norm1.num_groups, base.norm2.num_groups]
    sizes = {"width": base.conv1.out_channels, "groups": groups, "narrow": len(world.net.adapter["down"])}
    names = ("lr", "momentum", "weight_decay", "clip", "batch")
    return {**sizes, "classes": world.net.classes, **{name: getattr(train, name) for name in names}}


@torch.no_grad()
def accuracy(model: dict[str, Tensor], path: Path) -> float:
    """The accuracy of a model on the test images, in percent, over all classes."""
    work = PeerWork(str(path))
    network = work.network()
    network.load_state_dict(model)
    scores = network(torch.from_numpy(work.arrays["test_x"]))
    right = scores.argmax(1) == torch.from_numpy(work.arrays["test_y"])
    return 100 * float(right.float().mean())
