"""Where the memories lie after every position, before and after alignment, and where they should.

During a run with `keep_memories`, the remembered and the true class means of every position are kept in one small
file each (the model itself is not). Afterwards they become one table of points, `snapshots.npz`, by kind:

refreshed   classes current at the position, as the memory has them at its end
stale       old classes, as the memory had them when the position began
aligned     the same old classes at its end; PRO, which moves nothing, has them where they were
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from profcil.diagnostics.alignment import oracle_means
from profcil.errors import RunFolderError
from profcil.io.atomic_files import read_tensors, write_tensors

if TYPE_CHECKING:
    from profcil.engine.payload import ServerState
    from profcil.engine.world import World

SHOWN = 20  # real features a class, for the picture


@dataclass(frozen=True)
class Memory:
    """Remembered means and true ones after a position, rows by `labels`."""

    labels: tuple[int, ...]
    means: Tensor
    oracle: Tensor
    current: frozenset[int]  # classes that somebody had data of at this position


def save_memory(folder: Path, world: World, server: ServerState, position: int) -> None:
    """Writes a position's means, and a few real features, where the method has a memory."""
    from profcil import registry
    from profcil.engine.loop import judged_features

    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    features = judged_features(world, method, server)
    memories = method.memories(world.net, server)
    if not memories:
        return
    block, project = memories.get("memory") or next(iter(memories.values()))
    with torch.no_grad():
        u, y = project(features), world.judged.y
    active = world.plan.active(position)
    facts: dict[str, Any] = {
        "labels": list(block.labels),
        "current": sorted({v for c in active for v in world.plan.observed(int(c), position)}),
    }
    few = torch.cat([torch.nonzero(y == v).flatten()[:SHOWN] for v in sorted(world.plan.seen(position))])
    oracle = oracle_means(u, y, block.labels) if block.labels else u[:0]
    tensors = {"means": block.tensors["mean"], "oracle": oracle, "real": u[few], "real_label": y[few]}
    write_tensors(path_of(folder, position), tensors, facts)


def path_of(folder: Path, position: int) -> Path:
    return folder / f"position-{position:03d}.safetensors"


def gather(folder: Path, positions: int) -> dict[str, np.ndarray] | None:
    """All positions' points as plain arrays; None where the run kept no memories."""
    found = [read_tensors(path_of(folder, p)) for p in range(positions) if path_of(folder, p).exists()]
    if not found:
        return None
    whole = [f for f in found if f is not None]
    if len(whole) < positions:
        raise RunFolderError(
            f"{folder} lacks readable memories of some positions; run it again with keep_memories=true"
        )
    memories = [Memory(tuple(f["labels"]), t["means"], t["oracle"], frozenset(f["current"])) for t, f in whole]
    rows = [row for p in range(positions) for row in points(memories[p - 1] if p else None, memories[p], p)]
    real = {name: np.concatenate([t[name].numpy() for t, _ in whole]) for name in ("real", "real_label")}
    counts = [len(t["real_label"]) for t, _ in whole]
    return {**stacked(rows), **real, "real_position": np.repeat(np.arange(positions), counts)}


Point = tuple[int, str, int, Tensor, Tensor]  # position, kind, class, remembered mean, true mean


def points(before: Memory | None, after: Memory, position: int) -> list[Point]:
    """A position's points; a class that returns at this position counts as refreshed."""
    out: list[Point] = []
    for row, label in enumerate(after.labels):
        truth, now = after.oracle[row], after.means[row]
        if label in after.current:
            out.append((position, "refreshed", label, now, truth))
        elif before is not None and label in before.labels:
            out.append((position, "stale", label, before.means[before.labels.index(label)], truth))
            out.append((position, "aligned", label, now, truth))
    return out


def stacked(rows: list[Point]) -> dict[str, np.ndarray]:
    position, kind, label, means, oracle = zip(*rows, strict=True) if rows else ([], [], [], [], [])
    return {
        "position": np.array(position, dtype=np.int64),
        "kind": np.array(kind, dtype="<U9"),
        "labels": np.array(label, dtype=np.int64),
        "means": torch.stack(list(means)).numpy() if rows else np.zeros((0, 0), np.float32),
        "oracle": torch.stack(list(oracle)).numpy() if rows else np.zeros((0, 0), np.float32),
    }
