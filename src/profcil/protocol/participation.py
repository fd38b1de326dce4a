"""Who takes part in a round. It depends on the plan and its seed only, so all methods share one schedule.

A weakened task changes nobody's turn but those of the clients it takes away: the schedule is the clean plan's, and
whoever no longer has data sits out. A round may so have fewer participants, or none.
"""

from __future__ import annotations

import numpy as np

from profcil.protocol.plan import Plan
from profcil.randomness import generator


def participants(plan: Plan, position: int, round: int) -> tuple[int, ...]:
    """min(participants, clients with data) clients, uniform without replacement, ascending."""
    drawn = _draw(plan.clean, plan.clean.active(position), position, round)
    if plan.origin is None:
        return drawn
    active = set(plan.active(position).tolist())
    return tuple(c for c in drawn if c in active)


def warmup_participants(plan: Plan, round: int) -> tuple[int, ...]:
    """The same for a warm-up round, among the clients that own any data at any position."""
    return _draw(plan.clean, np.flatnonzero(plan.clean.counts.any(axis=1)), "warmup", round)


def _draw(plan: Plan, clients: np.ndarray, where: object, round: int) -> tuple[int, ...]:
    count = min(plan.settings.participants, len(clients))
    drawn = generator(plan.seed, "participation", where, round).choice(clients, size=count, replace=False)
    return tuple(np.sort(drawn).tolist())
