"""Remembered and true class means after every position, before and after alignment.

A run with `keep_memories` writes the remembered and the true class means of every position to one small file each; the
model is not saved. `gather` turns these files into one table of points, `snapshots.npz`, by kind:

refreshed   current classes of the position, in the memory after the position
stale       old classes, in the memory before the position
aligned     the same old classes, in the memory after the position; for PRO, which moves nothing, the same as stale
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profcil.engine.snapshots import path_of
from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_tensors


@dataclass(frozen=True)
class Memory:
    """Remembered and true means after a position; row i is class `labels[i]`."""

    labels: tuple[int, ...]
    means: Tensor
    oracle: Tensor
    current: frozenset[int]  # the classes that any client had data of at this position


def gather(folder: Path, positions: int) -> dict[str, np.ndarray] | None:
    """The points of all positions as plain arrays; None if the run kept no memories."""
    paths = [path_of(folder, p) for p in range(positions)]
    stored = [read_tensors(path) for path in paths if path.exists()]
    if not stored:
        return None
    readable = [file for file in stored if file is not None]
    if len(readable) < positions:
        raise RunFolderError(
            f"{folder} has no readable memories of some positions; run it again with keep_memories=true"
        )
    rows: list[Point] = []
    previous: Memory | None = None
    for position, (tensors, facts) in enumerate(readable):
        labels = tuple(facts["labels"])
        current = frozenset(facts["current"])
        memory = Memory(labels, tensors["means"], tensors["oracle"], current)
        rows += points(previous, memory, position)
        previous = memory
    arrays = as_arrays(rows)
    for name in ("real", "real_label"):
        parts = [tensors[name].numpy() for tensors, _ in readable]
        arrays[name] = np.concatenate(parts)
    counts = [len(tensors["real_label"]) for tensors, _ in readable]
    arrays["real_position"] = np.repeat(np.arange(positions), counts)
    return arrays


Point = tuple[int, str, int, Tensor, Tensor]  # position, kind, class, remembered mean, true mean


def points(previous: Memory | None, memory: Memory, position: int) -> list[Point]:
    """The points of a position. An old class that is current again at this position is refreshed."""
    out: list[Point] = []
    for row, label in enumerate(memory.labels):
        truth = memory.oracle[row]
        mean = memory.means[row]
        if label in memory.current:
            out.append((position, "refreshed", label, mean, truth))
        elif previous is not None and label in previous.labels:
            stale = previous.means[previous.labels.index(label)]
            out.append((position, "stale", label, stale, truth))
            out.append((position, "aligned", label, mean, truth))
    return out


def as_arrays(rows: list[Point]) -> dict[str, np.ndarray]:
    """The points as one array per field."""
    positions = [position for position, *_ in rows]
    kinds = [kind for _, kind, *_ in rows]
    labels = [label for _, _, label, *_ in rows]
    means = [mean for *_, mean, _ in rows]
    oracle = [truth for *_, truth in rows]
    return {
        "position": np.array(positions, dtype=np.int64),
        "kind": np.array(kinds, dtype="<U9"),
        "labels": np.array(labels, dtype=np.int64),
        "means": _stacked(means),
        "oracle": _stacked(oracle),
    }


def _stacked(means: list[Tensor]) -> np.ndarray:
    """Vectors as the rows of an array; an empty array where there are none."""
    if not means:
        return np.zeros((0, 0), np.float32)
    return torch.stack(means).numpy()
