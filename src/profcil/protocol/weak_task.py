"""The weak-task intervention: one task loses clients, examples and training budget. The other tasks do not change.

The paper (weak-task intervention of the generator-failure stress test) names these three reductions but gives no
numbers; `STRENGTHS` defines them. Dropped samples leave the stream: they are not given to other clients, so all other
cells keep their samples and every client keeps its order. The draws depend on the plan's seed and the task, not on the
strength: severe keeps a subset of what medium keeps, and medium a subset of what mild keeps.

Everything but the weak task is bit-identical to the clean run. The plan with the weak task refers to the clean plan
(`Plan.origin`), which three things follow: the warm-up, so that clean and weak runs share it; the schedule of
participants, without the clients that no longer have data; and a client's graph, in which dropped nodes only lose
their labels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral
from types import MappingProxyType

import numpy as np

from profcil.errors import ConfigError, DataError, unknown
from profcil.protocol.heterogeneity import share_of
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import assemble
from profcil.protocol.settings import STRENGTHS as NAMES
from profcil.protocol.settings import StreamSettings, check
from profcil.randomness import generator


@dataclass(frozen=True)
class Strength:
    """The fractions that are kept."""

    supporters: float  # of the clients with data of the task
    examples: float  # of each client's examples of each class
    epochs: float  # of the local epochs when the task is current


FRACTIONS = dict(zip(NAMES, (0.75, 0.5, 0.25), strict=True))
STRENGTHS = MappingProxyType({name: Strength(kept, kept, kept) for name, kept in FRACTIONS.items()})


@dataclass(frozen=True)
class Weakened:
    """A plan with a weak task, and the factor for the local epochs, which is not part of a plan.

    A client whose current task is the weak one trains max(1, epochs_factor x local epochs) epochs, rounded half up.
    All other turns have the full number of epochs. The engine applies the factor.
    """

    plan: Plan
    epochs_factor: float


def weaken(plan: Plan, labels: np.ndarray, task: int, strength: str) -> Weakened:
    """A plan with less data of one task (t*, counted from 0: the paper's task 4 is 3 here).

    `labels` are the training labels that the plan was made from. The support assumption still holds: every class of
    the task keeps a client, if necessary by keeping more clients than the fraction. A kept client keeps at least one
    example of each class that it observed, so its label coverage does not change.
    """
    check("weak_task", task, Integral, 0, plan.positions - 1)
    if not len(plan.supporters(task)):
        raise ConfigError(
            f"task {task} (counted from 0) has no samples in plan {plan.digest}; choose a task with samples"
        )
    if strength not in STRENGTHS:
        raise unknown("strength", str(strength), STRENGTHS)
    kept = STRENGTHS[strength]
    labels = np.asarray(labels)
    owner = _owners(plan, labels)
    of_task = np.isin(labels, plan.tasks[task])
    in_stream = owner >= 0
    ids = np.flatnonzero(in_stream & of_task)
    is_kept = _of_kept_clients(plan, task, kept.supporters, owner[ids], labels[ids])
    is_kept &= _kept_examples(plan, task, kept.examples, owner[ids], labels[ids])
    dropped = ids[~is_kept]
    owner[dropped] = -1
    weak = replace(_reassembled(plan, labels, owner), origin=plan.clean)
    return Weakened(weak, kept.epochs)


def weakened(plan: Plan, labels: np.ndarray, settings: StreamSettings) -> Weakened:
    """The plan with the weak task that the settings ask for; unchanged if they ask for none."""
    if settings.weak_task < 0:
        return Weakened(plan, 1.0)
    return weaken(plan, labels, settings.weak_task, settings.weak_strength)


def _reassembled(plan: Plan, labels: np.ndarray, owner: np.ndarray) -> Plan:
    """The plan with other owners of the samples."""
    return assemble(labels, owner, plan.tasks, plan.orders, plan.settings, plan.seed)


def _owners(plan: Plan, labels: np.ndarray) -> np.ndarray:
    """The owner of every sample, -1 for samples outside the stream. Labels of another dataset are a DataError."""
    are_class_ids = labels.ndim == 1 and labels.dtype.kind in "iu"
    if are_class_ids and len(labels) > plan.ids.max(initial=-1):
        owner = np.full(len(labels), -1, dtype=np.int64)
        cells = np.arange(plan.orders.size)
        cell_of_sample = np.repeat(cells, np.diff(plan.starts))
        owner[plan.ids] = cell_of_sample // plan.positions
        classes = np.concatenate(plan.tasks)
        is_known = np.isin(labels[plan.ids], classes)
        if is_known.all() and _reassembled(plan, labels, owner) == plan:
            return owner
    raise DataError(
        f"labels of shape {labels.shape} do not belong to plan {plan.digest}, allowed are the labels it was made from; "
        "give the training labels of the same dataset"
    )


def _of_kept_clients(plan: Plan, task: int, fraction: float, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which samples belong to a kept client. Clients that cover the task's classes are kept first, then random ones."""
    clients, row = np.unique(owner, return_inverse=True)
    classes = int(y.max()) + 1
    observed = np.zeros((len(clients), classes), dtype=bool)
    observed[row, y] = True
    random = generator(plan.seed, "weak-task", task, "supporters")
    shuffled = random.permutation(len(clients))
    first = _cover(observed[shuffled])
    others = np.setdiff1d(np.arange(len(clients)), first)
    priority = shuffled[np.concatenate([first, others])]
    wanted = share_of(fraction, len(clients))
    count = max(len(first), wanted)
    return np.isin(row, priority[:count])


def _cover(observed: np.ndarray) -> np.ndarray:
    """Rows that together observe every observed class: a greedy set cover, at most one row per class.

    The row with the most missing classes is taken next; ties go to the first row.
    """
    missing = observed.any(axis=0)
    rows: list[int] = []
    while missing.any():
        newly_covered = (observed & missing).sum(axis=1)
        row = int(newly_covered.argmax())
        rows.append(row)
        missing = missing & ~observed[row]
    return np.array(rows, dtype=np.int64)


def _kept_examples(plan: Plan, task: int, fraction: float, owner: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which samples are kept: of each client and class, a random max(1, fraction x n) of its n samples."""
    random = generator(plan.seed, "weak-task", task, "examples")
    shuffled = random.permutation(len(y))
    order = np.lexsort((shuffled, y, owner))
    pairs = np.stack([owner, y])
    _, group, size = np.unique(pairs, axis=1, return_inverse=True, return_counts=True)
    rank = np.empty(len(y), dtype=np.int64)
    group_start = np.cumsum(size) - size
    rank[order] = np.arange(len(y)) - np.repeat(group_start, size)
    shares = [share_of(fraction, n) for n in size.tolist()]
    quota = np.array(shares, dtype=np.int64)
    return rank < quota[group.reshape(-1)]
