"""Makes plans: draws one for a training set, or assembles one from the owner of every sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral

import numpy as np

from profcil.errors import ConfigError, DataError
from profcil.protocol.allocation import allocate
from profcil.protocol.heterogeneity import draw_orders
from profcil.protocol.plan import Plan, Tasks
from profcil.protocol.rare import keep_few
from profcil.protocol.settings import StreamSettings, check
from profcil.protocol.tasks import class_order, split
from profcil.randomness import generator


def assemble(
    labels: np.ndarray,
    owner: np.ndarray,
    tasks: Tasks,
    orders: np.ndarray,
    settings: StreamSettings,
    seed: int,
    joined: tuple[int, ...] = (),
    declared: tuple[int, ...] = (),
) -> Plan:
    """A plan from the owner of every sample. A sample with owner -1 is not in the stream. `joined` and `declared`
    belong to a plan that has grown."""
    classes = sum(map(len, tasks))
    cells = orders.size
    task_of = np.empty(classes, dtype=np.int64)
    for t, members in enumerate(tasks):
        task_of[list(members)] = t
    used = np.flatnonzero(owner >= 0)
    used_labels = labels[used]
    cell = owner[used] * len(tasks) + task_of[used_labels]
    by_cell = np.argsort(cell, kind="stable")
    observed = np.unique(cell * classes + used_labels)  # one number per (cell, class)
    observed_labels = observed % classes
    observed_cells = observed // classes
    return Plan(
        settings=settings,
        seed=seed,
        tasks=tasks,
        orders=orders,
        ids=used[by_cell],
        starts=_starts(cell, cells),
        labels=observed_labels,
        label_starts=_starts(observed_cells, cells),
        joined=joined,
        declared=declared,
    )


def _starts(cell: np.ndarray, cells: int) -> np.ndarray:
    """Where each cell begins in an array that is sorted by cell."""
    sizes = np.bincount(cell, minlength=cells)
    return np.concatenate([[0], np.cumsum(sizes)])


def make_plan(
    labels: np.ndarray | Sequence[int], classes: int, settings: StreamSettings, seed: int, tasks: Tasks = ()
) -> Plan:
    """The plan for a training set with these labels. The same arguments give the same plan on any machine. `tasks` are
    given ones; without them the classes are drawn in an order and cut."""
    check("seed", seed, Integral, 0, math.inf)
    labels = _checked_labels(labels, classes)
    if tasks and settings.task_size != max(map(len, tasks)):
        raise ConfigError(
            f"task_size is {settings.task_size}, but the tasks of the data are given and have up to "
            f"{max(map(len, tasks))} classes; leave task_size out"
        )
    tasks = tasks or split(class_order(classes, seed), settings.task_size)
    random = generator(seed, "disorder")
    orders = draw_orders(settings.sampler, settings.clients, len(tasks), settings.disorder, random)
    owner = keep_few(allocate(labels, tasks, settings, seed), labels, classes, settings, seed)
    return assemble(labels, owner, tasks, orders, settings, int(seed))


def _checked_labels(labels: np.ndarray | Sequence[int], classes: int) -> np.ndarray:
    """Labels as an int64 array; anything but class ids is a DataError."""
    labels = np.asarray(labels)
    is_list = labels.ndim == 1 and labels.size > 0
    if not is_list or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype} of shape {labels.shape}, allowed is a list of class ids; check the dataset"
        )
    lowest = labels.min()
    highest = labels.max()
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"labels run from {lowest} to {highest}, allowed is 0 to {classes - 1}; "
            "check the dataset's labels and class count"
        )
    return labels.astype(np.int64)
