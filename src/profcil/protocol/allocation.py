"""Who owns which training sample: a class's samples are divided among the supporters that observe the class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profcil.protocol.heterogeneity import cover, draw_quotas, draw_supporters
from profcil.randomness import generator

if TYPE_CHECKING:
    from profcil.protocol.plan import Tasks
    from profcil.protocol.settings import StreamSettings


def sizes(samples: int, owners: int, dirichlet: float, random: np.random.Generator) -> np.ndarray:
    """How many of a class's samples each owner gets: within one of each other, or in Dirichlet(alpha) proportions."""
    if dirichlet == 0:
        return samples // owners + random.permutation(np.arange(owners) < samples % owners)
    bounds = np.cumsum(random.dirichlet(np.full(owners, dirichlet)))
    bounds[-1] = 1.0  # the sum of the proportions, free of rounding
    return np.diff(np.floor(bounds * samples + 0.5).astype(np.int64), prepend=0)


def allocate(labels: np.ndarray, tasks: Tasks, settings: StreamSettings, seed: int) -> np.ndarray:
    """The owner (client id) of every sample. Each draw has its own address, so one control moves without the others."""
    owner = np.empty(len(labels), dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=sum(map(len, tasks))))])
    for t, classes in enumerate(tasks):
        clients = draw_supporters(settings.clients, settings.support, generator(seed, "support", t))
        random = generator(seed, "coverage", t)
        rows, given = cover(draw_quotas(len(clients), len(classes), settings.coverage, random), classes, random)
        for y in classes:
            who, ids = clients[rows[given == y]], by_class[bounds[y] : bounds[y + 1]]
            random = generator(seed, "allocation", y)
            owner[random.permutation(ids)] = np.repeat(who, sizes(len(ids), len(who), settings.dirichlet, random))
    return owner
