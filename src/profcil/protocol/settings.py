"""The settings of a stream, checked on construction."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from typing import Any

from profcil.config import setting
from profcil.errors import ConfigError, unknown
from profcil.protocol.heterogeneity import SAMPLERS

STRENGTHS = ("mild", "medium", "severe")  # of a weak-task intervention; defined in `weak_task`


def check(key: str, value: Any, kind: type, low: float, high: float) -> None:
    """Check that a setting is a number of this kind within these bounds."""
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    is_allowed = is_number and low <= value <= high
    if not is_allowed:
        what = "a whole number" if kind is Integral else "a number"
        bounds = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ConfigError(f"{key} is {value!r}, allowed is {what} {bounds}; change {key}")


@dataclass(frozen=True)
class StreamSettings:
    """The clients, the tasks, and the paper's heterogeneity controls: support, coverage and disorder."""

    clients: int = setting(MISSING, "clients of the stream", low=1)
    participants: int = setting(MISSING, "clients sampled per round, at most `clients`", low=1)
    task_size: int = setting(MISSING, "classes per task", low=1)
    support: float = setting(1.0, "fraction of clients that support a task", low=0.0, high=1.0)
    coverage: float = setting(1.0, "fraction of a task's labels that a supporter observes", low=0.0, high=1.0)
    disorder: float = setting(0.0, "fraction of task positions perturbed per client", low=0.0, high=1.0)
    sampler: str = setting("derange", "how an order is perturbed", choices=tuple(SAMPLERS))
    dirichlet: float = setting(
        0.0,
        "concentration of the division of a class among its supporters; 0 divides evenly",
        low=0.0,
        high=1_000_000,
    )
    rare: float = setting(0.0, "fraction of the classes that have few training examples", low=0.0, high=1.0)
    rare_examples: int = setting(3, "training examples that such a class keeps, over all clients", low=1)
    weak_task: int = setting(-1, "the task that is weakened, counted from 0; -1 weakens none", low=-1)
    weak_strength: str = setting(
        "", "how strongly it is weakened; empty where no task is weakened", choices=("", *STRENGTHS)
    )

    def __post_init__(self) -> None:
        check("clients", self.clients, Integral, 1, math.inf)
        check("participants", self.participants, Integral, 1, self.clients)
        check("task_size", self.task_size, Integral, 1, math.inf)
        for key in ("support", "coverage", "disorder", "rare"):
            check(key, getattr(self, key), Real, 0, 1)
        check("rare_examples", self.rare_examples, Integral, 1, math.inf)
        check("dirichlet", self.dirichlet, Real, 0, 1_000_000)
        if str(self.sampler) not in SAMPLERS:
            raise unknown("sampler", str(self.sampler), SAMPLERS)
        check("weak_task", self.weak_task, Integral, -1, math.inf)
        self._check_strength()
        for key in ("clients", "participants", "task_size", "rare_examples", "weak_task"):
            number = int(getattr(self, key))
            object.__setattr__(self, key, number)
        for key in ("support", "coverage", "disorder", "dirichlet", "rare"):  # so that 1 and 1.0 have the same digest
            fraction = float(getattr(self, key))
            object.__setattr__(self, key, fraction)

    def _check_strength(self) -> None:
        """Check that a weak task and its strength are both given or both left out."""
        has_task = self.weak_task >= 0
        has_strength = bool(self.weak_strength)
        if has_task != has_strength:
            strengths = "|".join(STRENGTHS)
            raise ConfigError(
                f"weak_task is {self.weak_task} and weak_strength is {self.weak_strength!r}, allowed is both or "
                f"neither; give weak_task=N with weak_strength={strengths}, or leave both out"
            )
        if has_strength and self.weak_strength not in STRENGTHS:
            raise unknown("strength", str(self.weak_strength), STRENGTHS)
