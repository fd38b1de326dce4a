"""What is measured after a position: correct predictions, and how well the memory agrees with true class means."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from profcil.data.bundle import Examples
from profcil.engine.channel import ServerState
from profcil.engine.client import FeatureKey, embed_once
from profcil.engine.world import World
from profcil.methods.base import Method
from profcil.metrics.alignment import compare_means


@torch.no_grad()
def evaluation_features(
    world: World,
    method: Method,
    server: ServerState,
    cache: dict[FeatureKey, Tensor] | None = None,
    examples: Examples | None = None,
) -> Tensor:
    """The features of the evaluation examples, or of others, that the method computes its scores from.

    `cache` holds those of the evaluation before. Features under a block that has not changed since are reused.
    """
    examples = world.evaluation_examples if examples is None else examples
    index = torch.arange(len(examples), device=world.device)
    cache = {} if cache is None else cache
    present = {block.version for block in server.blocks.values()}
    for key in [key for key in cache if key[2] not in present]:
        del cache[key]
    features = method.views(
        server, lambda feature_map: embed_once(world.net, feature_map, examples, index, cache, "evaluation")
    )
    world.net.load(server.weights())
    return features


@torch.no_grad()
def evaluate(
    world: World,
    method: Method,
    server: ServerState,
    position: int,
    features: Tensor,
    examples: Examples | None = None,
) -> np.ndarray:
    """Correct predictions per class, arg-max over Y^(p), on the evaluation examples or on others."""
    examples = world.evaluation_examples if examples is None else examples
    allowed = torch.tensor(sorted(world.plan.seen(position)), device=world.device)
    scores = method.scores(world.net, server, features)
    guess = allowed[scores[:, allowed].argmax(1)]
    right = examples.y[guess == examples.y]
    return torch.bincount(right, minlength=world.bundle.facts.classes).cpu().numpy()


def sum_by_task(world: World, right: np.ndarray, position: int) -> np.ndarray:
    """Correct predictions per task; −1 for tasks that are not introduced yet."""
    seen = world.plan.seen(position)
    sums = [right[list(task)].sum() if set(task) <= set(seen) else -1 for task in world.plan.tasks]
    return np.array(sums, dtype=np.int64)


def class_accuracy(world: World, right: np.ndarray, position: int) -> list[float | None]:
    """Accuracy per class in percent; None for classes that are not introduced yet or have no examples."""
    total = class_totals(world)
    seen = world.plan.seen(position)
    known = [y in seen and total[y] > 0 for y in range(len(total))]
    return [round(100 * float(right[y] / total[y]), 3) if known[y] else None for y in range(len(total))]


@torch.no_grad()
def examine(
    world: World, method: Method, server: ServerState, position: int, features: Tensor
) -> dict[str, dict[str, Any]]:
    """How well the stored means of old classes agree with the true ones, for each memory of the method."""
    current = world.plan.current(position)
    found = {}
    for name, (memory, project) in method.memories(world.net, server).items():
        rows = [i for i, y in enumerate(memory.labels) if y not in current]
        if rows:
            labels = tuple(memory.labels[i] for i in rows)
            means = memory.tensors["mean"][rows]
            found[name] = compare_means(means, project(features), world.evaluation_examples.y, labels)
    return found


def task_totals(world: World, examples: Examples | None = None) -> np.ndarray:
    """The number of evaluation examples, or of others, of each task."""
    count = class_totals(world, examples)
    return np.array([count[list(t)].sum() for t in world.plan.tasks], dtype=np.int64)


def class_totals(world: World, examples: Examples | None = None) -> np.ndarray:
    """The number of evaluation examples, or of others, of each class."""
    examples = world.evaluation_examples if examples is None else examples
    return torch.bincount(examples.y.cpu(), minlength=world.bundle.facts.classes).numpy()
