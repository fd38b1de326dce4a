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
    drawn = _draw(plan.clean, plan.clean.active(position), position, round)
    if plan.origin is None:
        return drawn
    active = set(plan.active(position).tolist())
    return tuple(c for c in drawn if c in active)


def warmup_participants(plan: Plan, round: int) -> tuple[int, ...]:
    """The participants of a warm-up round: a uniform sample of the clients with data at any position."""
    clients = np.flatnonzero(plan.clean.counts.any(axis=1))
    return _draw(plan.clean, clients, "warmup", round)


def dictionary_participants(plan: Plan) -> tuple[int, ...]:
    """The participants of every round in which a dictionary is found: all clients with data at any position."""
    return tuple(np.flatnonzero(plan.clean.counts.any(axis=1)).tolist())


def _draw(plan: Plan, clients: np.ndarray, where: object, round: int) -> tuple[int, ...]:
    count = min(plan.settings.participants, len(clients))
    random = generator(plan.seed, "participation", where, round)
    drawn = random.choice(clients, size=count, replace=False)
    return tuple(np.sort(drawn).tolist())
