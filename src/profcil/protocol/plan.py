"""The stream plan: which client meets which task when, with which labels and samples.

A plan is a pure function of (labels, settings, seed). Everything per client lies in a few flat arrays, grouped by cell
(client, task), so that 100,000 clients are cheap: the samples of cell k are `ids[starts[k]:starts[k + 1]]`.
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
    """A stream, ready to run. Positions and task ids count from 0; classes are the dataset's own ids."""

    settings: StreamSettings
    seed: int
    tasks: Tasks  # Y_t
    orders: np.ndarray  # [clients, tasks]: pi_c[p], the task that client c meets at position p
    ids: np.ndarray  # sample ids, sorted by (client, task, id)
    starts: np.ndarray  # [clients x tasks + 1]: where a cell begins in ids
    labels: np.ndarray  # observed class ids, sorted by (client, task, class)
    label_starts: np.ndarray  # [clients x tasks + 1]: where a cell begins in labels
    origin: Plan | None = None  # of a plan with a weak task: the plan before that; not saved

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
        """The plan without an intervention: what warm-up, ownership and the participation schedule follow."""
        return self.origin or self

    @property
    def positions(self) -> int:
        return len(self.tasks)

    @cached_property
    def counts(self) -> np.ndarray:
        """Samples per cell, [clients, tasks]: |D_{c,t}|."""
        return np.diff(self.starts).reshape(self.orders.shape)

    def samples(self, client: int, position: int) -> np.ndarray:
        """D_{c,p}: the ids of the samples that a client trains on at a position, ascending."""
        cell = self._cell(client, position)
        return self.ids[self.starts[cell] : self.starts[cell + 1]]

    def owned(self, client: int) -> np.ndarray:
        """All samples that a client meets at any position, ascending."""
        self._inside(client, 0)
        first = client * self.positions
        return np.sort(self.ids[self.starts[first] : self.starts[first + self.positions]])

    def observed(self, client: int, position: int) -> tuple[int, ...]:
        """The observed labels: the classes a client really has samples of at a position, a part of its task's."""
        cell = self._cell(client, position)
        return tuple(self.labels[self.label_starts[cell] : self.label_starts[cell + 1]].tolist())

    def supporters(self, task: int) -> np.ndarray:
        """C_t: the clients that hold data of a task."""
        return np.flatnonzero(self.counts[:, task])

    def active(self, position: int) -> np.ndarray:
        """The clients with data at a position; all others are idle there."""
        self._inside(0, position)
        return self._active[position]

    @cached_property
    def _active(self) -> list[np.ndarray]:
        """Of every position: asked for in every round, which should not cost more the more clients there are."""
        there = np.take_along_axis(self.counts, self.orders, axis=1) > 0
        return [np.flatnonzero(column) for column in there.T]

    def seen(self, position: int) -> frozenset[int]:
        """Y^(p): the classes of all tasks that any client, idle ones too, has met up to a position."""
        self._inside(0, position)
        return self._seen[position]

    @cached_property
    def _seen(self) -> list[frozenset[int]]:
        """Of every position: asked for in every turn."""
        met = np.zeros((self.positions, self.positions), dtype=bool)
        met[np.arange(self.positions), self.orders] = True
        upto = np.logical_or.accumulate(met)
        return [frozenset(y for t in np.flatnonzero(row) for y in self.tasks[t]) for row in upto]

    def current(self, position: int) -> frozenset[int]:
        """The classes that anyone observes at a position."""
        self._inside(0, position)
        here = self.orders[:, [position]] == np.arange(self.positions)  # cells of this position
        return frozenset(np.unique(self.labels[np.repeat(here.ravel(), np.diff(self.label_starts))]).tolist())

    def _cell(self, client: int, position: int) -> int:
        self._inside(client, position)
        return int(client) * self.positions + int(self.orders[client, position])

    def _inside(self, client: int, position: int) -> None:
        if not (0 <= client < self.clients and 0 <= position < self.positions):
            raise ConfigError(
                f"client {client} at position {position} is not in the plan; "
                f"choose a client from 0 to {self.clients - 1} and a position from 0 to {self.positions - 1}"
            )

    @property
    def header(self) -> dict[str, Any]:
        """Everything but the arrays, as plain values. A weakened task shows in the arrays, not here."""
        settings = {k: v for k, v in asdict(self.settings).items() if not k.startswith("weak_")}
        return {"settings": settings, "seed": self.seed, "tasks": [list(t) for t in self.tasks]}

    @cached_property
    def digest(self) -> str:
        """A hash over the header and every array: two plans are the same if their digests are."""
        total = hashlib.blake2b(archive.encode(self.header), digest_size=16)
        for name in ARRAYS:
            array = getattr(self, name)
            total.update(f"{name}{array.shape}".encode() + array.tobytes())
        return total.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def save(self, path: str | Path) -> None:
        """Write the plan to one file, all of it or nothing."""
        archive.write(path, {**self.header, "digest": self.digest}, {name: getattr(self, name) for name in ARRAYS})

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan back and check that it is the one that was saved."""
        return archive.read(path, cls._rebuild)

    @classmethod
    def _rebuild(cls, header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Plan:
        tasks = tuple(tuple(t) for t in header["tasks"])
        known: dict[str, Any] = {name: arrays[name] for name in ARRAYS}
        plan = cls(StreamSettings(**header["settings"]), header["seed"], tasks, **known)
        if plan.digest != header["digest"]:
            raise ValueError("its digest is not that of its content")
        return plan

    def audit(self) -> dict[str, Any]:
        """What the draws came to: realised support, coverage, disorder, idle cells and the support assumption."""
        return audit.audit(self)

    def describe(self, limit: int = 20) -> str:
        """Who sees what when, as text: at most `limit` tasks and clients, then the audit."""
        return audit.describe(self, limit)


def assemble(
    labels: np.ndarray, owner: np.ndarray, tasks: Tasks, orders: np.ndarray, settings: StreamSettings, seed: int
) -> Plan:
    """A plan from the owner of every sample; owner -1 leaves a sample out of the stream."""
    classes, cells = sum(map(len, tasks)), orders.size
    task_of = np.empty(classes, dtype=np.int64)
    for t, members in enumerate(tasks):
        task_of[list(members)] = t
    used = np.flatnonzero(owner >= 0)
    cell = owner[used] * len(tasks) + task_of[labels[used]]
    ids = used[np.argsort(cell, kind="stable")]
    seen = np.unique(cell * classes + labels[used])
    return Plan(
        settings, seed, tasks, orders, ids, _starts(cell, cells), seen % classes, _starts(seen // classes, cells)
    )


def _starts(cell: np.ndarray, cells: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=cells))])


def make_plan(labels: np.ndarray | Sequence[int], classes: int, settings: StreamSettings, seed: int) -> Plan:
    """The plan for a training set with these labels: the same on any machine for the same arguments."""
    check("seed", seed, Integral, 0, math.inf)
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
    labels = labels.astype(np.int64)
    tasks = split(class_order(classes, seed), settings.task_size)
    draw = generator(seed, "disorder")
    orders = draw_orders(settings.sampler, settings.clients, len(tasks), settings.disorder, draw)
    return assemble(labels, allocate(labels, tasks, settings, seed), tasks, orders, settings, int(seed))
