"""The stream plan: which task each client has at each position, with which labels and samples.

A plan is a pure function of (labels, settings, seed). All data about clients are stored in a few flat arrays, grouped
by cell (client, task), so that 100,000 clients are cheap: the samples of cell k are `ids[starts[k]:starts[k + 1]]`.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from profcil.errors import ConfigError
from profcil.protocol import archive, audit
from profcil.protocol.settings import StreamSettings

Tasks = tuple[tuple[int, ...], ...]
LATER = ("joined", "declared")  # what is saved of a plan that has grown
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
    joined: tuple[int, ...] = ()  # the position from which each client takes part; empty = all from the first
    declared: tuple[int, ...] = ()  # the position from which each task is known; empty = all from the first

    def __post_init__(self) -> None:
        for name, kind in ARRAYS.items():
            given = np.ascontiguousarray(getattr(self, name), dtype=kind)
            array = given.view()
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
        start = self.starts[cell]
        end = self.starts[cell + 1]
        return self.ids[start:end]

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
        samples = np.take_along_axis(self.counts, self.orders, axis=1)  # [clients, positions]
        has_data = samples > 0
        return [np.flatnonzero(column) for column in has_data.T]

    def seen(self, position: int) -> frozenset[int]:
        """Y^(p): the classes of all tasks that any client, idle or not, has had up to a position."""
        self._check_inside(0, position)
        return self._seen[position]

    @cached_property
    def _seen(self) -> list[frozenset[int]]:
        """The seen classes of all positions, cached because every client turn needs them."""
        introduced = np.zeros((self.positions, self.positions), dtype=bool)
        clients, positions = np.nonzero(self._takes_part)
        introduced[positions, self.orders[clients, positions]] = True
        seen_tasks = np.logical_or.accumulate(introduced)
        seen = []
        for is_seen in seen_tasks:
            tasks = np.flatnonzero(is_seen)
            classes = [self.tasks[t] for t in tasks]
            seen.append(frozenset().union(*classes))
        return seen

    @cached_property
    def _takes_part(self) -> np.ndarray:
        """Whether a client had joined at a position, and its task there was known by then, [clients, positions]."""
        positions = np.arange(self.positions)[None, :]
        joined = np.array(self.joined or (0,) * self.clients)[:, None]
        declared = np.array(self.declared or (0,) * self.positions)[self.orders]
        takes_part: np.ndarray = (positions >= joined) & (positions >= declared)
        return takes_part

    def current(self, position: int) -> frozenset[int]:
        """The classes that any client observes at a position."""
        self._check_inside(0, position)
        current_tasks = self.orders[:, [position]]
        is_current = current_tasks == np.arange(self.positions)  # [clients, tasks]
        labels_per_cell = np.diff(self.label_starts)
        of_label = np.repeat(is_current.ravel(), labels_per_cell)
        classes = np.unique(self.labels[of_label])
        return frozenset(classes.tolist())

    def _cell(self, client: int, position: int) -> int:
        """The number of the cell of a client's task at a position."""
        self._check_inside(client, position)
        first_cell = int(client) * self.positions
        task = int(self.orders[client, position])
        return first_cell + task

    def _check_inside(self, client: int, position: int) -> None:
        has_client = 0 <= client < self.clients
        has_position = 0 <= position < self.positions
        if not (has_client and has_position):
            raise ConfigError(
                f"client {client} at position {position} (counted from 0) is not in the plan; "
                f"choose a client from 0 to {self.clients - 1} and a position from 0 to {self.positions - 1}"
            )

    @property
    def header(self) -> dict[str, Any]:
        """Everything but the arrays, as plain values. A weak task changes the arrays, not the header; settings of rare
        classes are named where there are some."""
        left_out = ("weak_",) if self.settings.rare else ("weak_", "rare")
        all_settings = asdict(self.settings)
        settings = {k: v for k, v in all_settings.items() if not k.startswith(left_out)}
        tasks = [list(t) for t in self.tasks]
        later = {name: list(getattr(self, name)) for name in LATER if any(getattr(self, name))}
        return {"settings": settings, "seed": self.seed, "tasks": tasks, **later}

    @cached_property
    def digest(self) -> str:
        """A hash of the header and all arrays. Plans with equal digests are equal."""
        header = archive.encode(self.header)
        total = hashlib.blake2b(header, digest_size=16)
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
        known |= {name: tuple(header.get(name, ())) for name in LATER}
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
