"""The participants of each round. They depend on the plan and its seed only, so all methods share one schedule.

A plan with a weak task has the schedule of the clean plan, without the clients that no longer have data. So a round
may have fewer participants, or none.
"""

from __future__ import annotations

import numpy as np

from profcil.protocol.plan import Plan
from profcil.randomness import generator


def participants(plan: Plan, position: int, round: int) -> tuple[int, ...]:
    """The participants of a round, ascending: a uniform sample of the clients with data at the position."""
    candidates = plan.clean.active(position)
    drawn = _draw(plan.clean, candidates, position, round)
    if plan.origin is None:
        return drawn
    active = set(plan.active(position).tolist())
    return tuple(c for c in drawn if c in active)


def warmup_participants(plan: Plan, round: int) -> tuple[int, ...]:
    """The participants of a warm-up round: a uniform sample of the clients with data at any position."""
    return _draw(plan.clean, _clients_with_data(plan), "warmup", round)


def dictionary_participants(plan: Plan) -> tuple[int, ...]:
    """The participants of every round in which a dictionary is found: all clients with data at any position."""
    return tuple(_clients_with_data(plan).tolist())


def _clients_with_data(plan: Plan) -> np.ndarray:
    """The clients with data at any position of the plan without a weak task."""
    has_data = plan.clean.counts.any(axis=1)
    return np.flatnonzero(has_data)


def _draw(plan: Plan, clients: np.ndarray, where: object, round: int) -> tuple[int, ...]:
    count = min(plan.settings.participants, len(clients))
    random = generator(plan.seed, "participation", where, round)
    drawn = random.choice(clients, size=count, replace=False)
    return tuple(np.sort(drawn).tolist())
