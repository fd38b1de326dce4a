"""The stream plan: which task each client has at each position, with which labels and samples.

A plan is a pure function of (labels, settings, seed). All data about clients are stored in a few flat arrays, grouped
by cell (client, task), so that 100,000 clients are cheap: the samples of cell k are `ids[starts[k]:starts[k + 1]]`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from profcil.errors import ConfigError, DataError
from profcil.protocol import archive, audit
from profcil.protocol.allocation import allocate
from profcil.protocol.heterogeneity import draw_orders
from profcil.protocol.settings import StreamSettings, check
from profcil.protocol.tasks import class_order, split
from profcil.randomness import generator

Tasks = tuple[tuple[int, ...], ...]
ARRAYS = {"orders": "<i4", "ids": "<i8", "starts": "<i8", "labels": "<i4", "label_starts": "<i8"}


@dataclass(frozen=True, eq=False)
class Plan:
    """A stream, ready to run. Positions and tasks are counted from 0; classes are the dataset's class ids."""

    settings: StreamSettings
    seed: int
    tasks: Tasks  # Y_t
    orders: np.ndarray  # [clients, tasks]: pi_c[p], the task of client c at position p
    ids: np.ndarray  # sample ids, sorted by (client, task, id)
    starts: np.ndarray  # [clients x tasks + 1]: where a cell begins in ids
    labels: np.ndarray  # observed class ids, sorted by (client, task, class)
    label_starts: np.ndarray  # [clients x tasks + 1]: where a cell begins in labels
    origin: Plan | None = None  # of a plan with a weak task: the plan without it; not saved

    def __post_init__(self) -> None:
        for name, kind in ARRAYS.items():
            array = np.ascontiguousarray(getattr(self, name), dtype=kind).view()
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    @property
    def clients(self) -> int:
        return len(self.orders)

    @property
    def clean(self) -> Plan:
        """The plan without a weak task. Warm-up, ownership and the participation schedule follow it."""
        return self.origin or self

    @property
    def positions(self) -> int:
        return len(self.tasks)

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples per cell, [clients, tasks]: |D_{c,t}|."""
        return np.diff(self.starts).reshape(self.orders.shape)

    def samples(self, client: int, position: int) -> np.ndarray:
        """D_{c,p}: the ids of a client's training samples at a position, ascending."""
        cell = self._cell(client, position)
        return self.ids[self.starts[cell] : self.starts[cell + 1]]

    def owned(self, client: int) -> np.ndarray:
        """The ids of a client's samples at all positions, ascending."""
        self._check_inside(client, 0)
        first_cell = client * self.positions
        start = self.starts[first_cell]
        end = self.starts[first_cell + self.positions]
        return np.sort(self.ids[start:end])

    def observed(self, client: int, position: int) -> tuple[int, ...]:
        """The observed labels: the classes of the client's samples at a position, a subset of its task's classes."""
        cell = self._cell(client, position)
        start = self.label_starts[cell]
        end = self.label_starts[cell + 1]
        return tuple(self.labels[start:end].tolist())

    def supporters(self, task: int) -> np.ndarray:
        """C_t: the clients with data of a task."""
        return np.flatnonzero(self.counts[:, task])

    def active(self, position: int) -> np.ndarray:
        """The clients with data at a position; all others are idle."""
        self._check_inside(0, position)
        return self._active[position]

    @cached_property
    def _active(self) -> list[np.ndarray]:
        """The active clients of all positions, cached because every round needs them."""
        has_data = np.take_along_axis(self.counts, self.orders, axis=1) > 0
        return [np.flatnonzero(column) for column in has_data.T]

    def seen(self, position: int) -> frozenset[int]:
        """Y^(p): the classes of all tasks that any client, idle or not, has had up to a position."""
        self._check_inside(0, position)
        return self._seen[position]

    @cached_property
    def _seen(self) -> list[frozenset[int]]:
        """The seen classes of all positions, cached because every client turn needs them."""
        introduced = np.zeros((self.positions, self.positions), dtype=bool)
        introduced[np.arange(self.positions), self.orders] = True
        seen_tasks = np.logical_or.accumulate(introduced)
        seen = []
        for is_seen in seen_tasks:
            classes = [self.tasks[t] for t in np.flatnonzero(is_seen)]
            seen.append(frozenset().union(*classes))
        return seen

    def current(self, position: int) -> frozenset[int]:
        """The classes that any client observes at a position."""
        self._check_inside(0, position)
        is_current = self.orders[:, [position]] == np.arange(self.positions)  # [clients, tasks]
        of_label = np.repeat(is_current.ravel(), np.diff(self.label_starts))
        return frozenset(np.unique(self.labels[of_label]).tolist())

    def _cell(self, client: int, position: int) -> int:
        """The number of the cell of a client's task at a position."""
        self._check_inside(client, position)
        return int(client) * self.positions + int(self.orders[client, position])

    def _check_inside(self, client: int, position: int) -> None:
        if not (0 <= client < self.clients and 0 <= position < self.positions):
            raise ConfigError(
                f"client {client} at position {position} (counted from 0) is not in the plan; "
                f"choose a client from 0 to {self.clients - 1} and a position from 0 to {self.positions - 1}"
            )

    @property
    def header(self) -> dict[str, Any]:
        """Everything but the arrays, as plain values. A weak task changes the arrays, not the header."""
        settings = {k: v for k, v in asdict(self.settings).items() if not k.startswith("weak_")}
        return {"settings": settings, "seed": self.seed, "tasks": [list(t) for t in self.tasks]}

    @cached_property
    def digest(self) -> str:
        """A hash of the header and all arrays. Plans with equal digests are equal."""
        total = hashlib.blake2b(archive.encode(self.header), digest_size=16)
        for name in ARRAYS:
            array = getattr(self, name)
            head = f"{name}{array.shape}".encode()
            total.update(head + array.tobytes())
        return total.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | Path) -> None:
        """Write the plan to one file, atomically."""
        header = {**self.header, "digest": self.digest}
        arrays = {name: getattr(self, name) for name in ARRAYS}
        archive.write(path, header, arrays)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from its file and verify its digest."""
        return archive.read(path, cls._rebuild)

    @classmethod
    def _rebuild(cls, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Plan:
        tasks = tuple(tuple(t) for t in header["tasks"])
        known: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
        settings = StreamSettings(**header["settings"])
        plan = cls(settings, header["seed"], tasks, **known)
        if plan.digest != header["digest"]:
            raise ValueError("its digest does not match its content")
        return plan

    def audit(self) -> dict[str, Any]:
        """Realised support, coverage and disorder, idle cells and the support assumption."""
        return audit.audit(self)

    def describe(self, limit: int = 20) -> str:
        """The plan as text: the task of each client at each position, and the audit."""
        return audit.describe(self, limit)


def assemble(
    labels: np.ndarray, owner: np.ndarray, tasks: Tasks, orders: np.ndarray, settings: StreamSettings, seed: int
) -> Plan:
    """A plan from the owner of every sample. A sample with owner -1 is not in the stream."""
    classes = sum(map(len, tasks))
    cells = orders.size
    task_of = np.empty(classes, dtype=np.int64)
    for t, members in enumerate(tasks):
        task_of[list(members)] = t
    used = np.flatnonzero(owner >= 0)
    cell = owner[used] * len(tasks) + task_of[labels[used]]
    ids = used[np.argsort(cell, kind="stable")]
    observed = np.unique(cell * classes + labels[used])  # one number per (cell, class)
    observed_labels = observed % classes
    observed_cells = observed // classes
    return Plan(
        settings=settings,
        seed=seed,
        tasks=tasks,
        orders=orders,
        ids=ids,
        starts=_starts(cell, cells),
        labels=observed_labels,
        label_starts=_starts(observed_cells, cells),
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
    owner = allocate(labels, tasks, settings, seed)
    return assemble(labels, owner, tasks, orders, settings, int(seed))


def _checked_labels(labels: np.ndarray | Sequence[int], classes: int) -> np.ndarray:
    """Labels as an int64 array; anything but class ids is a DataError."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.size == 0 or labels.dtype.kind not in "iu":
        raise DataError(
            f"labels are {labels.dtype} of shape {labels.shape}, allowed is a list of class ids; check the dataset"
        )
    if labels.min() < 0 or labels.max() >= classes:
        given = f"from {labels.min()} to {labels.max()}"
        raise DataError(
            f"labels run {given}, allowed is 0 to {classes - 1}; check the dataset's labels and class count"
        )
    return labels.astype(np.int64)
