"""The stream's settings, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from profcil.errors import ConfigError, unknown
from profcil.protocol.heterogeneity import SAMPLERS


def check(key: str, value: Any, kind: type, low: float, high: float) -> None:
    """Refuse what is not a number of this kind within these bounds, naming the key."""
    number = isinstance(value, kind) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        what = "a whole number" if kind is Integral else "a number"
        bounds = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ConfigError(f"{key} is {value!r}, allowed is {what} {bounds}; change {key}")


@dataclass(frozen=True)
class StreamSettings:
    """What the world does to the clients; the three fractions are the paper's heterogeneity controls."""

    clients: int
    participants: int  # clients sampled per round
    task_size: int  # classes per task
    support: float = 1.0  # fraction of clients that support a task
    coverage: float = 1.0  # fraction of a task's labels that a supporter observes
    disorder: float = 0.0  # fraction of task positions perturbed per client
    sampler: str = "derange"  # how an order is perturbed: derange or adjacent
    dirichlet: float = 0.0  # concentration of the division of a class among its supporters; 0 divides evenly

    def __post_init__(self) -> None:
        check("clients", self.clients, Integral, 1, math.inf)
        check("participants", self.participants, Integral, 1, self.clients)
        check("task_size", self.task_size, Integral, 1, math.inf)
        for key in ("support", "coverage", "disorder"):
            check(key, getattr(self, key), Real, 0, 1)
        check("dirichlet", self.dirichlet, Real, 0, 1_000_000)
        if str(self.sampler) not in SAMPLERS:
            raise unknown("sampler", str(self.sampler), SAMPLERS)
        for key in ("clients", "participants", "task_size"):
            object.__setattr__(self, key, int(getattr(self, key)))
        for key in ("support", "coverage", "disorder", "dirichlet"):  # 1 and 1.0 are one setting and one digest
            object.__setattr__(self, key, float(getattr(self, key)))
