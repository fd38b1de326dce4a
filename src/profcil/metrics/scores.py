"""The correct predictions of the global model per (position, task)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Scores:
    """Correct predictions `[position, task]`, -1 if the task is not introduced yet, and test examples `total[task]`."""

    correct: np.ndarray
    total: np.ndarray

    @classmethod
    def empty(cls, tasks: int, total: np.ndarray) -> Scores:
        """Scores before the first position."""
        correct = np.full((tasks, tasks), -1, dtype=np.int64)
        return cls(correct, total.astype(np.int64))

    def to_json(self) -> dict[str, Any]:
        """The scores as plain values."""
        correct = self.correct.tolist()
        total = self.total.tolist()
        return {"correct": correct, "total": total}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scores:
        """The scores from the values of `to_json`."""
        correct = np.array(data["correct"], dtype=np.int64)
        total = np.array(data["total"], dtype=np.int64)
        return cls(correct, total)
