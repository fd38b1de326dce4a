"""Saves the stored and the true class means of a position in one small file, for runs with `keep_memories`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from profcil import registry
from profcil.engine.channel import ServerState
from profcil.engine.evaluation import evaluation_features
from profcil.engine.world import World
from profcil.io.atomic_files import write_tensors
from profcil.metrics.alignment import oracle_means

SHOWN = 20  # real features per class, for the figure


def save_memory(folder: Path, world: World, server: ServerState, position: int) -> None:
    """Writes the means of a position and a few real features, if the method has a memory."""
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    features = evaluation_features(world, method, server)
    memories = method.memories(world.net, server)
    if not memories:
        return
    block, project = memories.get("memory") or next(iter(memories.values()))
    y = world.evaluation_examples.y
    with torch.no_grad():
        u = project(features)
    facts: dict[str, Any] = {"labels": list(block.labels), "current": current_classes(world, position)}
    seen = sorted(world.plan.seen(position))
    rows_by_class = [torch.nonzero(y == label).flatten() for label in seen]
    shown = torch.cat([rows[:SHOWN] for rows in rows_by_class])
    oracle = oracle_means(u, y, block.labels) if block.labels else u[:0]
    tensors = {"means": block.tensors["mean"], "oracle": oracle, "real": u[shown], "real_label": y[shown]}
    write_tensors(path_of(folder, position), tensors, facts)


def current_classes(world: World, position: int) -> list[int]:
    """The classes that any client observes at a position."""
    classes: set[int] = set()
    for client in world.plan.active(position):
        classes.update(world.plan.observed(int(client), position))
    return sorted(classes)


def path_of(folder: Path, position: int) -> Path:
    """The file of a position."""
    return folder / f"position-{position:03d}.safetensors"
