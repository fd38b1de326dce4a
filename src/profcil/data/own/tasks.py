"""The order of classes and their division into tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from profcil.config import OwnSettings
from profcil.data.own.raw import Raw
from profcil.errors import ConfigError, DataError, nearest
from profcil.protocol.tasks import class_order

Tasks = tuple[tuple[int, ...], ...]
MOST_TASKS = 5  # by default
FEWEST_CLASSES = 4  # of which tasks have two classes by default; with fewer classes, they have one


def class_names(raw: Raw, settings: OwnSettings, path: Path) -> tuple[str, ...]:
    """The classes in the order of their ids: by name, as numbers if all are numbers; or as they arrive."""
    present = dict.fromkeys(raw.labels)
    if len(present) < 2:
        only = f"one class ('{next(iter(present))}')" if present else "no examples"
        raise DataError(f"{path} has {only}, and at least two classes are needed; add examples of other classes")
    if settings.order == "arrival":
        return tuple(present)
    if raw.names:
        return tuple(name for name in raw.names if name in present)
    if all(name.lstrip("-").isdecimal() for name in present):
        return tuple(sorted(present, key=int))
    return tuple(sorted(present))


def default_task_size(classes: int) -> int:
    """Classes per task: at most five tasks, of two classes at least where there are enough."""
    if classes < FEWEST_CLASSES:
        return 1
    return max(2, -(-classes // MOST_TASKS))


def tasks_of(names: Sequence[str], settings: OwnSettings, seed: int) -> Tasks:
    """The given tasks, as class ids; empty if they are drawn with the seed and cut by stream.task_size."""
    if settings.task_list:
        return listed_tasks(names, settings.task_list)
    if not settings.tasks:
        return ()
    if settings.tasks > len(names):
        raise ConfigError(
            f"own.tasks is {settings.tasks}, and the data has {len(names)} classes; give at most as many tasks"
        )
    arrival = settings.order == "arrival"
    order = range(len(names)) if arrival else class_order(len(names), seed)
    tasks = np.array_split(list(order), settings.tasks)
    return tuple(tuple(task.tolist()) for task in tasks)


def listed_tasks(names: Sequence[str], given: Sequence[Sequence[str]]) -> Tasks:
    """Tasks that are given by class names. Each class is in exactly one of them."""
    ids = {name: i for i, name in enumerate(names)}
    named = [name for task in given for name in task]
    for name in named:
        if name not in ids:
            raise ConfigError(
                f"the tasks name the class '{name}', which the data does not have; {nearest(name, names)}"
            )
        if named.count(name) > 1:
            raise ConfigError(f"the tasks name the class '{name}' twice; each class belongs to one task")
    for name in names:
        if name not in named:
            raise ConfigError(f"the tasks leave out the class '{name}'; add it to one of them")
    return tuple(tuple(ids[name] for name in task) for task in given)


def read_task_file(path: Path) -> tuple[tuple[str, ...], ...]:
    """Tasks from a text file: one task a line, its class names separated by commas."""
    lines = path.read_text(encoding="utf-8").splitlines()
    tasks = []
    for line in lines:
        names = [name.strip() for name in line.split(",")]
        task = tuple(name for name in names if name)
        if task:
            tasks.append(task)
    return tuple(tasks)
