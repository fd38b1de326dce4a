"""Which sites take part with which data, and how that grows between positions: sites join, classes are declared.

What has passed stays as it was. A site that joins takes part from the next position on; its data of earlier positions
is not used. The same steps are taken in a deployment and in its simulation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profcil.data.bundle import Bundle
from profcil.deploy.sites.declarations import complete_orders, declared_order
from profcil.deploy.sites.federation import Federation
from profcil.engine.evaluation import task_totals
from profcil.engine.run_state import RunState
from profcil.engine.world import World
from profcil.metrics.ledger import HEADER
from profcil.metrics.scores import Scores
from profcil.protocol.plan import Plan

Declaration = Mapping[str, Any]
STAGE = "enrolment"  # in the ledger


@dataclass(frozen=True)
class Enrolment:
    """The declarations by which a plan was made, from a position on."""

    position: int = 0
    declarations: Mapping[int, Declaration] = field(default_factory=dict)  # by client; `joined` is the first position
    orders: tuple[tuple[int, ...], ...] = ()  # the task of each site at each position

    def extended(self, terms: Federation, offered: Mapping[int, Declaration], position: int) -> Enrolment:
        """The enrolment with what sites offer for a position and later ones, under the terms at that position."""
        declarations = dict(self.declarations)
        for client, declaration in sorted(offered.items()):
            if int(declaration.get("joins", 0)) > position:
                continue
            merged = merge(self.declarations.get(client), declaration, terms, position)
            if merged["counts"] and not is_same(merged, self.declarations.get(client)):
                declarations[client] = merged
        declared = [declared_order(declarations.get(c, {})) for c in range(len(terms.sites))]
        before = [row[:position] for row in self.orders]
        orders = complete_orders(declared, len(terms.tasks), before)
        return Enrolment(position, declarations, tuple(map(tuple, orders.tolist())))

    def is_like(self, other: Enrolment) -> bool:
        """Whether two enrolments lead to the same plan."""
        return self.declarations == other.declarations and self.orders == other.orders

    def order_array(self) -> np.ndarray:
        return np.array(self.orders, dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        declarations = {str(client): dict(declaration) for client, declaration in self.declarations.items()}
        return {"position": self.position, "declarations": declarations, "orders": [list(row) for row in self.orders]}


def enrolment_of_json(values: Mapping[str, Any]) -> Enrolment:
    """The enrolment that `to_json` wrote."""
    declarations = {int(client): declaration for client, declaration in values["declarations"].items()}
    return Enrolment(int(values["position"]), declarations, tuple(map(tuple, values["orders"])))


def merge(old: Declaration | None, new: Declaration, terms: Federation, position: int) -> dict[str, Any]:
    """What a site declared for the positions that have passed, and what it declares now for the others."""
    past = {p: t for p, t in declared_order(old or {}).items() if p < position}
    coming = {p: t for p, t in declared_order(new).items() if p >= position and t not in past.values()}
    tasks = terms.task_ids()
    counts: dict[str, int] = {}
    for declaration, order in ((old or {}, past), (new, coming)):
        labels = sorted(y for t in order.values() for y in tasks[t])
        counts |= {str(y): int(declaration["counts"][str(y)]) for y in labels if str(y) in declaration["counts"]}
    whole = {str(p): t for p, t in sorted((past | coming).items())}
    return {"order": whole, "counts": counts, "joined": int(old.get("joined", 0)) if old else position}


def is_same(one: Declaration, other: Declaration | None) -> bool:
    """Whether two declarations say the same. One from the start has no `joined`."""
    return other is not None and {**one, "joined": 0} == {**other, "joined": 0}


def replace_plan(world: World, plan: Plan, bundle: Bundle) -> None:
    """Replaces the plan and the data of a world between two positions."""
    world.plan = plan
    world.bundle = bundle.to(world.device)
    world.labels = bundle.train.y
    world.shares.clear()
    world.kept = (None, {})
    world.forget_features()
    world.executor.clear_caches()


def extend_scores(world: World, state: RunState) -> None:
    """Adds the tasks of a new plan to the scores."""
    state.evaluated.clear()
    scores = Scores.empty(world.plan.positions, task_totals(world))
    known = len(state.scores.total)
    scores.correct[:known, :known] = state.scores.correct
    state.scores = scores


def record_growth(state: RunState, before: Enrolment, after: Enrolment, terms: Federation) -> dict[str, Any]:
    """Meters the new declarations and class names. Returns what happened, for the log."""
    position = after.position
    changed = [c for c, declaration in after.declarations.items() if before.declarations.get(c) != declaration]
    classes = [name for task, p in zip(terms.tasks, terms.declared, strict=True) if p == position for name in task]
    for client, declaration in sorted(after.declarations.items()):
        names = len(json.dumps(classes)) if classes else 0
        state.ledger.record(STAGE, position, 0, client, "down", {HEADER: names})
        size = len(json.dumps(declaration)) if client in changed else 0
        state.ledger.record(STAGE, position, 0, client, "up", {HEADER: size})
    new = [c for c in changed if c not in before.declarations]
    return {
        "enrolment": after.to_json(),
        "sites": [terms.sites[c] for c in new],
        "clients": new,
        "classes": classes,
        "changed": [terms.sites[c] for c in changed if c not in new],
    }
