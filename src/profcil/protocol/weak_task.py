"""The weak-task intervention: one task loses clients, examples and training budget, the rest of the stream stays.

The paper (weak-task intervention of the generator-failure stress test) names the three reductions and no figures;
`STRENGTHS` fixes them. What is dropped leaves the stream: nothing is dealt to other clients, so every other cell keeps
its samples and every client keeps its order. All draws depend on the plan's seed and the task, not on the strength:
severe keeps a subset of what medium keeps, and medium of what mild keeps.

What is not the weak task stays to the bit. The weakened plan remembers the clean one (`Plan.origin`): the warm-up runs
under that, so that clean and weak runs share it; the schedule of participants is the clean one without the clients
that now sit out; and a client's graph keeps the dropped nodes, which only lose their labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType

import numpy as np

from profcil.errors import ConfigError, DataError, unknown
from profcil.protocol.heterogeneity import share_of
from profcil.protocol.plan import Plan, assemble
from profcil.protocol.settings import STRENGTHS as NAMES
from profcil.protocol.settings import StreamSettings, check
from profcil.randomness import generator


@dataclass(frozen=True)
class Strength:
    """What is kept, as fractions."""

    supporters: float  # of the clients that hold data of the task
    examples: float  # of what each of them holds of each class
    epochs: float  # of the local epochs where the task is current


STRENGTHS = MappingProxyType(
    {name: Strength(kept, kept, kept) for name, kept in zip(NAMES, (0.75, 0.5, 0.25), strict=True)}
)


@dataclass(frozen=True)
class Weakened:
    """A plan with a weak task, and what a plan cannot say.

    A client whose current task is the weak one trains max(1, epochs_factor x local epochs) epochs, rounded half up;
    every other turn keeps its epochs. Whoever runs the plan applies it.
    """

    plan: Plan
    epochs_factor: float


def weaken(plan: Plan, labels: np.ndarray, task: int, strength: str) -> Weakened:
    """The same plan with less of one task (t*, counted from 0; the paper's task 4 is 3 here).

    `labels` are the training labels the plan was made from. The support assumption still holds for the task: every
    class keeps a client, for which more clients than the fraction are kept if need be, and a kept client keeps at
    least one example of each class it observed, so its label coverage does not move.
    """
    check("weak_task", task, Integral, 0, plan.positions - 1)
    if not len(plan.supporters(task)):
        raise ConfigError(f"task {task} has no samples in plan {plan.digest}; choose a task that has some")
    if strength not in STRENGTHS:
        raise unknown("strength", str(strength), STRENGTHS)
    kept, labels = STRENGTHS[strength], np.asarray(labels)
    owner = _owners(plan, labels)
    ids = np.flatnonzero((owner >= 0) & np.isin(labels, plan.tasks[task]))
    stay = _clients(plan, task, kept.supporters, owner[ids], labels[ids])
    stay &= _examples(plan, task, kept.examples, owner[ids], labels[ids])
    owner[ids[~stay]] = -1
    weak = assemble(labels, owner, plan.tasks, plan.orders, plan.settings, plan.seed)
    return Weakened(replace(weak, origin=plan.clean), kept.epochs)


def weakened(plan: Plan, labels: np.ndarray, settings: StreamSettings) -> Weakened:
    """The plan as the settings want it: weakened, or as it is with the full budget."""
    if settings.weak_task < 0:
        return Weakened(plan, 1.0)
    return weaken(plan, labels, settings.weak_task, settings.weak_strength)


def _owners(plan: Plan, labels: np.ndarray) -> np.ndarray:
    """The owner of every sample, -1 for those outside the stream: what the plan was assembled from."""
    if labels.ndim == 1 and labels.dtype.kind in "iu" and len(labels) > plan.ids.max(initial=-1):
        owner = np.full(len(labels), -1, dtype=np.int64)
        owner[plan.ids] = np.repeat(np.arange(plan.orders.size), np.diff(plan.starts)) // plan.positions
        known = np.isin(labels[plan.ids], np.concatenate(plan.tasks)).all()
        if known and assemble(labels, owner, plan.tasks, plan.orders, plan.settings, plan.seed) == plan:
            return owner
    raise DataError(
        f"labels of shape {labels.shape} do not belong to plan {plan.digest}, allowed are the labels it was made from; "
        "give the training labels of the same dataset"
    )


def _clients(plan: Plan, task: int, fraction: float, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which samples are with a kept client: first those that cover the task's classes, then at random."""
    clients, row = np.unique(owner, return_inverse=True)
    observed = np.zeros((len(clients), int(y.max()) + 1), dtype=bool)
    observed[row, y] = True
    shuffled = generator(plan.seed, "weak-task", task, "supporters").permutation(len(clients))
    first = _cover(observed[shuffled])
    queue = shuffled[np.concatenate([first, np.setdiff1d(np.arange(len(clients)), first)])]
    return np.isin(row, queue[: max(len(first), share_of(fraction, len(clients)))])


def _cover(observed: np.ndarray) -> np.ndarray:
    """Rows that together observe every class that any row does: the one with most new classes next, ties to the first.

    Greedy, hence few rows, and at most one per class.
    """
    missing, rows = observed.any(axis=0), []
    while missing.any():
        rows.append(int((observed & missing).sum(axis=1).argmax()))
        missing = missing & ~observed[rows[-1]]
    return np.array(rows, dtype=np.int64)


def _examples(plan: Plan, task: int, fraction: float, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which samples are among the first max(1, fraction x n) of their client and class, in a random order."""
    luck = generator(plan.seed, "weak-task", task, "examples").permutation(len(y))
    order = np.lexsort((luck, y, owner))
    _, group, size = np.unique(np.stack([owner, y]), axis=1, return_inverse=True, return_counts=True)
    rank = np.empty(len(y), dtype=np.int64)
    rank[order] = np.arange(len(y)) - np.repeat(np.cumsum(size) - size, size)
    quota = np.array([share_of(fraction, n) for n in size.tolist()], dtype=np.int64)
    return rank < quota[group.reshape(-1)]
