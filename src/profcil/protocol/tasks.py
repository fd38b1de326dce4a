"""Tasks: a seeded class order, cut into disjoint class sets Y_1, ..., Y_T."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from profcil.errors import ConfigError
from profcil.randomness import generator


def class_order(classes: int, seed: int) -> tuple[int, ...]:
    """A seeded permutation of the class ids 0 to classes - 1."""
    random = generator(seed, "classes")
    order = random.permutation(classes)
    return tuple(order.tolist())


def split(order: Sequence[int], size: int) -> tuple[tuple[int, ...], ...]:
    """Tasks of `size` classes each; the remainder joins the last task (7 classes by 2 are 2/2/3)."""
    if not 1 <= size <= len(order):
        raise ConfigError(
            f"task_size is {size}, allowed is 1 to {len(order)} (the number of classes); change task_size"
        )
    count = len(order) // size
    cuts = [size * t for t in range(count)] + [len(order)]
    tasks = [tuple(order[a:b]) for a, b in pairwise(cuts)]
    return tuple(tasks)
