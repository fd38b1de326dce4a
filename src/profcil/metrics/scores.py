"""Correct predictions per (position, task), counted once for the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Scores:
    """`correct[p, t]` after position p; −1 where task t had not been introduced. `total[t]` test examples."""

    correct: np.ndarray
    total: np.ndarray

    @classmethod
    def empty(cls, tasks: int, total: np.ndarray) -> Scores:
        return cls(np.full((tasks, tasks), -1, dtype=np.int64), total.astype(np.int64))

    def to_json(self) -> dict[str, Any]:
        return {"correct": self.correct.tolist(), "total": self.total.tolist()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Scores:
        return cls(np.array(data["correct"], dtype=np.int64), np.array(data["total"], dtype=np.int64))
