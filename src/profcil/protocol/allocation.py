"""The owner of every training sample: the samples of a class are divided among the supporters that observe it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from profcil.protocol.heterogeneity import assign_labels, draw_quotas, draw_supporters
from profcil.randomness import generator

if TYPE_CHECKING:
    from profcil.protocol.plan import Tasks
    from profcil.protocol.settings import StreamSettings


def share_sizes(samples: int, owners: int, dirichlet: float, random: np.random.Generator) -> np.ndarray:
    """How many samples of a class each owner gets: equal shares up to one sample, or Dirichlet proportions."""
    if dirichlet == 0:
        gets_one_more = random.permutation(np.arange(owners) < samples % owners)
        return samples // owners + gets_one_more
    concentrations = np.full(owners, dirichlet)
    bounds = np.cumsum(random.dirichlet(concentrations))
    bounds[-1] = 1.0  # exactly, without the rounding error of the sum
    ends = np.floor(bounds * samples + 0.5)
    return np.diff(ends.astype(np.int64), prepend=0)


def allocate(labels: np.ndarray, tasks: Tasks, settings: StreamSettings, seed: int) -> np.ndarray:
    """The owner (client id) of every sample.

    Support, coverage and allocation have separate generators, so changing one control leaves the other draws alone.
    """
    owner = np.empty(len(labels), dtype=np.int64)
    by_class = np.argsort(labels, kind="stable")
    class_count = sum(map(len, tasks))
    class_sizes = np.bincount(labels, minlength=class_count)
    bounds = np.concatenate([[0], np.cumsum(class_sizes)])
    for t, classes in enumerate(tasks):
        random = generator(seed, "support", t)
        clients = draw_supporters(settings.clients, settings.support, random)
        random = generator(seed, "coverage", t)
        quotas = draw_quotas(len(clients), len(classes), settings.coverage, random)
        rows, assigned = assign_labels(quotas, classes, random)
        for y in classes:
            owners = clients[rows[assigned == y]]
            ids = by_class[bounds[y] : bounds[y + 1]]
            random = generator(seed, "allocation", y)
            sizes = share_sizes(len(ids), len(owners), settings.dirichlet, random)
            owner[random.permutation(ids)] = np.repeat(owners, sizes)
    return owner
