"""The weak-task intervention: one task loses clients, examples and training budget, the rest of the stream stays.

The paper (weak-task intervention of the generator-failure stress test) names the three reductions and no figures;
`STRENGTHS` fixes them. What is dropped leaves the stream: nothing is dealt to other clients, so every other cell keeps
its samples and every client keeps its order. All draws depend on the plan's seed and the task, not on the strength:
severe keeps a subset of what medium keeps, and medium of what mild keeps.

Three things follow. At a position where a dropped client met the weak task it is now idle, so the participants of that
position are drawn from fewer clients; all other positions keep theirs. Who owns nothing else also leaves the warm-up,
and dropped samples are not seen there: to share one warm-up with the clean run, warm up under the clean plan. And of
a graph, a client's subgraph loses the dropped nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType

import numpy as np

from profcil.errors import ConfigError, DataError, unknown
from profcil.protocol.heterogeneity import share_of
from profcil.protocol.plan import Plan, assemble
from profcil.protocol.settings import check
from profcil.randomness import generator


@dataclass(frozen=True)
class Strength:
    """What is kept, as fractions."""

    supporters: float  # of the clients that hold data of the task
    examples: float  # of what each of them holds of each class
    epochs: float  # of the local epochs where the task is current


STRENGTHS = MappingProxyType(
    {
        "mild": Strength(supporters=0.75, examples=0.75, epochs=0.75),
        "medium": Strength(supporters=0.5, examples=0.5, epochs=0.5),
        "severe": Strength(supporters=0.25, examples=0.25, epochs=0.25),
    }
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
    check("task", task, Integral, 0, plan.positions - 1)
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
    return Weakened(assemble(labels, owner, plan.tasks, plan.orders, plan.settings, plan.seed), kept.epochs)


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
