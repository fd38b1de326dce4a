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
    stored = [read_tensors(path_of(folder, p)) for p in range(positions) if path_of(folder, p).exists()]
    if not stored:
        return None
    readable = [file for file in stored if file is not None]
    if len(readable) < positions:
        raise RunFolderError(
            f"{folder} has no readable memories of some positions; run it again with keep_memories=true"
        )
    memories = [
        Memory(tuple(facts["labels"]), tensors["means"], tensors["oracle"], frozenset(facts["current"]))
        for tensors, facts in readable
    ]
    rows: list[Point] = []
    for p in range(positions):
        rows += points(memories[p - 1] if p else None, memories[p], p)
    real = {name: np.concatenate([t[name].numpy() for t, _ in readable]) for name in ("real", "real_label")}
    counts = [len(tensors["real_label"]) for tensors, _ in readable]
    return {**as_arrays(rows), **real, "real_position": np.repeat(np.arange(positions), counts)}


Point = tuple[int, str, int, Tensor, Tensor]  # position, kind, class, remembered mean, true mean


def points(before: Memory | None, after: Memory, position: int) -> list[Point]:
    """The points of a position. An old class that is current again at this position is refreshed."""
    out: list[Point] = []
    for row, label in enumerate(after.labels):
        truth = after.oracle[row]
        now = after.means[row]
        if label in after.current:
            out.append((position, "refreshed", label, now, truth))
        elif before is not None and label in before.labels:
            stale = before.means[before.labels.index(label)]
            out.append((position, "stale", label, stale, truth))
            out.append((position, "aligned", label, now, truth))
    return out


def as_arrays(rows: list[Point]) -> dict[str, np.ndarray]:
    """The points as one array per field."""
    position, kind, label, means, oracle = zip(*rows, strict=True) if rows else ([], [], [], [], [])
    return {
        "position": np.array(position, dtype=np.int64),
        "kind": np.array(kind, dtype="<U9"),
        "labels": np.array(label, dtype=np.int64),
        "means": torch.stack(list(means)).numpy() if rows else np.zeros((0, 0), np.float32),
        "oracle": torch.stack(list(oracle)).numpy() if rows else np.zeros((0, 0), np.float32),
    }
