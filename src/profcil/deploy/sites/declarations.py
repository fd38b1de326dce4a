"""What sites declare: the tasks they have, in which order, and how many examples of each class. All of it is one plan.

A declaration has `order` (position to task), `counts` (class id to examples) and, of a site that joins later, `joins`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from profcil.deploy.sites.federation import Federation
from profcil.deploy.sites.federation_file import is_count
from profcil.protocol.plan import Plan
from profcil.protocol.plan_making import assemble
from profcil.protocol.settings import StreamSettings


def declaration_error(declaration: Mapping[str, Any], federation: Federation) -> str:
    """What is wrong with a site's declaration, which comes over the network. Empty if it is valid."""
    tasks = federation.task_ids()
    try:
        order = {int(p): int(t) for p, t in declaration["order"].items()}
        counts = {int(y): int(n) for y, n in declaration["counts"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
        return "the declaration cannot be read"
    if not {*order, *order.values()} <= set(range(len(tasks))) or len(set(order.values())) < len(order):
        return "the declared order names positions or tasks that do not exist, or one task twice"
    if not counts or not set(counts) <= {y for t in order.values() for y in tasks[t]}:
        return "the declaration names no class, or a class whose task never arrives"
    if min(counts.values()) < 1 or sum(counts.values()) > federation.max_examples:
        return (
            f"the declared counts are not from 1 of each class to {federation.max_examples} in all; "
            "max_examples in federation.toml sets the limit"
        )
    if not is_count(declaration.get("joins", 0), 0):
        return "the position from which the site takes part is not a whole number"
    return ""


def complete_orders(
    orders: Sequence[Mapping[int, int]], tasks: int, before: Sequence[Sequence[int]] = ()
) -> np.ndarray:
    """Each site's order over all positions, sites × positions.

    A site without data at a position is given a task that it has no data of, and is idle there, as in the paper. Of the
    remaining tasks it is given the one that arrives first at any site. `before` are the orders at the positions that
    have passed: a site keeps the idle tasks that it had there, unless it has data of them now.
    """
    arrivals = [first_position(task, orders, default=tasks) for task in range(tasks)]
    rows = []
    for site, order in enumerate(orders):
        kept = {p: t for p, t in enumerate(before[site] if before else ()) if t not in order.values()}
        filled = {**kept, **order}
        remaining = sorted(set(range(tasks)) - set(filled.values()), key=lambda t: (arrivals[t], t))
        rows.append([filled[p] if p in filled else remaining.pop(0) for p in range(tasks)])
    return np.array(rows, dtype=np.int64)


def first_position(task: int, orders: Sequence[Mapping[int, int]], default: int) -> int:
    """The first position at which a task arrives at any site."""
    return min((p for order in orders for p, t in order.items() if t == task), default=default)


def joint_plan(
    federation: Federation,
    declarations: Mapping[int, Mapping[str, Any]],
    settings: StreamSettings,
    seed: int,
    orders: np.ndarray | None = None,
) -> Plan:
    """The plan of all sites. The server has no examples; it makes one label for each declared example. `orders` are
    those of a plan that has grown."""
    declared = [declared_order(declarations.get(c, {})) for c in range(len(federation.sites))]
    clients: list[int] = []
    labels: list[int] = []
    counts: list[int] = []
    for client, declaration in sorted(declarations.items()):
        for label, count in declaration["counts"].items():
            clients.append(client)
            labels.append(int(label))
            counts.append(int(count))
    y = np.repeat(labels, counts).astype(np.int64)
    owner = np.repeat(clients, counts).astype(np.int64)
    complete = complete_orders(declared, len(federation.tasks)) if orders is None else orders
    joined = joined_positions(federation, declarations)
    return assemble(y, owner, federation.task_ids(), complete, settings, seed, joined, federation.declared)


def joined_positions(federation: Federation, declarations: Mapping[int, Mapping[str, Any]]) -> tuple[int, ...]:
    """The position from which each site takes part; 0 also for a site that is left out."""
    return tuple(int(declarations.get(c, {}).get("joined", 0)) for c in range(len(federation.sites)))


def declared_order(declaration: Mapping[str, Any]) -> dict[int, int]:
    return {int(p): int(t) for p, t in declaration.get("order", {}).items()}
