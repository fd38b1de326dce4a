"""Rare classes: a seeded share of the classes keeps a few training examples in the whole federation.

The other examples of these classes leave the stream: no client has them, before the stream neither. Which clients keep
an example is decided after the division among clients, so that all other classes stay where they are. For the same
seed a larger share adds classes, and a larger number adds examples.
"""

from __future__ import annotations

import numpy as np

from profcil.protocol.heterogeneity import share_of
from profcil.protocol.settings import StreamSettings
from profcil.randomness import generator

OUTSIDE = -1  # the owner of an example that is not in the stream


def rare_classes(classes: int, share: float, seed: int) -> tuple[int, ...]:
    """The rare classes, ascending: a share of all, at least one if the share is not 0."""
    if not share:
        return ()
    shuffled = generator(seed, "rare").permutation(classes)
    chosen = shuffled[: share_of(share, classes)]
    return tuple(sorted(chosen.tolist()))


def keep_few(owner: np.ndarray, labels: np.ndarray, classes: int, settings: StreamSettings, seed: int) -> np.ndarray:
    """The owners of all examples, where those of rare classes beyond the number that is kept have none."""
    owner = owner.copy()
    for y in rare_classes(classes, settings.rare, seed):
        ids = np.flatnonzero(labels == y)
        shuffled = generator(seed, "rare", y).permutation(ids)
        owner[shuffled[settings.rare_examples :]] = OUTSIDE
    return owner
