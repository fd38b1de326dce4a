"""The audit of a plan: the heterogeneity that the draws really gave, as numbers and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.protocol.heterogeneity import missing_labels, share_of
from profcil.protocol.rare import rare_classes

if TYPE_CHECKING:
    from profcil.protocol.plan import Plan


def audit(plan: Plan) -> dict[str, Any]:
    """Realised support, coverage and disorder, the support assumption, and the cells without data, as plain values."""
    return {**_heterogeneity(plan), **_supported_classes(plan), **_cells(plan), **_rare(plan), **_growth(plan)}


def _rare(plan: Plan) -> dict[str, Any]:
    """The classes with few training examples; nothing for a plan without any."""
    settings = plan.settings
    found = rare_classes(sum(map(len, plan.tasks)), settings.rare, plan.seed)
    return {"rare_classes": list(found), "rare_examples": settings.rare_examples} if found else {}


def _growth(plan: Plan) -> dict[str, Any]:
    """The clients that joined after the start and the tasks that were declared after it, each with the position from
    which it counts. Empty for a plan that was complete at the start."""
    found = {}
    for name, positions in (("joined_later", plan.joined), ("declared_later", plan.declared)):
        late = {str(number): position for number, position in enumerate(positions) if position}
        if late:
            found[name] = late
    return found


def _heterogeneity(plan: Plan) -> dict[str, Any]:
    """Realised support, coverage and disorder."""
    differs = plan.orders != np.arange(plan.positions)
    return {
        "sampler": plan.settings.sampler,
        "support": _support(plan).tolist(),
        "coverage": _coverage(plan).tolist(),
        "disorder": float(differs.mean()),
    }


def _supported_classes(plan: Plan) -> dict[str, Any]:
    """The support assumption: whether every class has a supporter, and what that took."""
    classes = set().union(*plan.tasks)
    observed = np.unique(plan.labels)
    unsupported = sorted(classes.difference(observed.tolist()))
    supporters = share_of(plan.settings.support, plan.clients)
    coverage = plan.settings.coverage
    quotas_grown = [missing_labels(supporters, len(task), coverage) for task in plan.tasks]
    return {
        "support_assumption": not unsupported,
        "unsupported_classes": unsupported,
        "quotas_grown": quotas_grown,
    }


def _cells(plan: Plan) -> dict[str, Any]:
    """The number of cells and samples, and of cells and clients without data."""
    is_idle = plan.counts == 0
    is_empty = is_idle.all(axis=1)
    return {
        "cells": int(plan.orders.size),
        "idle_cells": int(is_idle.sum()),
        "untaught_cells": _untaught_cells(plan),
        "empty_clients": int(is_empty.sum()),
        "samples": len(plan.ids),
    }


def _support(plan: Plan) -> np.ndarray:
    """|C_t| / C per task."""
    has_data = plan.counts > 0
    shares: np.ndarray = has_data.mean(axis=0)
    return shares


def _coverage(plan: Plan) -> np.ndarray:
    """The share of a task's labels that a client observes, averaged over the clients with data of the task."""
    labels_per_cell = np.diff(plan.label_starts).reshape(plan.orders.shape)
    labels = labels_per_cell.sum(axis=0)
    has_data = plan.counts > 0
    supporters = np.maximum(1, has_data.sum(axis=0))
    sizes = np.array([len(task) for task in plan.tasks])
    shares: np.ndarray = labels / supporters / sizes
    return shares


def _untaught_cells(plan: Plan) -> int:
    """The number of cells (client, position) whose task no client has had data of up to that position.

    CTA includes these cells.
    """
    position_of = np.argsort(plan.orders, axis=1, kind="stable")  # p_c(t), the inverse of the order
    taught = np.where(plan.counts > 0, position_of, plan.positions)
    first_taught = taught.min(axis=0)  # position, by task
    is_untaught = first_taught[plan.orders] > np.arange(plan.positions)
    return int(is_untaught.sum())


def describe(plan: Plan, limit: int = 20) -> str:
    """The plan as text: the classes of each task, a table of clients by positions, and the audit.

    Tasks and positions are counted from 1. At most `limit` tasks and clients are listed.
    """
    title = (
        f"plan {plan.digest}: seed {plan.seed}, {plan.clients} clients, {plan.settings.participants} per round, "
        f"{plan.positions} tasks"
    )
    tasks = []
    for number, classes in enumerate(plan.tasks, start=1):
        ids = " ".join(str(y) for y in classes)
        tasks.append(f"task {number}: classes {ids}")
    lines = [title, "", *_shorten(tasks, limit), ""]
    lines += [*_table(plan, limit), ""]
    lines += _audit_lines(plan)
    return "\n".join(lines)


def _shorten(tasks: list[str], limit: int) -> list[str]:
    """The first `limit` lines, and a line that says how many were left out."""
    limit = max(0, limit)
    rest = len(tasks) - limit
    if rest <= 0:
        return tasks
    return [*tasks[:limit], f"... and {rest} more tasks"]


def _table(plan: Plan, limit: int) -> list[str]:
    """The task of each client at each position."""
    shown = min(plan.clients, max(0, limit))
    lines = ["the task of each client at each position, both counted from 1; (t) is idle: no data of task t"]
    titles = [f"p{p + 1}" for p in range(plan.positions)]
    lines.append(_table_row("client", titles))
    for client in range(shown):
        cells = [_cell(plan, client, p) for p in range(plan.positions)]
        lines.append(_table_row(str(client), cells))
    rest = plan.clients - shown
    if rest > 0:
        lines.append(f"... and {rest} more clients")
    return lines


def _table_row(name: str, cells: list[str]) -> str:
    padded = [f"{cell:>7}" for cell in cells]
    return f"{name:>8}" + "".join(padded)


def _cell(plan: Plan, client: int, position: int) -> str:
    task = plan.orders[client, position]
    number = task + 1
    return f"{number}" if plan.counts[client, task] else f"({number})"


def _audit_lines(plan: Plan) -> list[str]:
    """The audit, one line per number."""
    facts = plan.audit()
    unsupported = facts["unsupported_classes"]
    assumption = f"broken by classes {unsupported}" if unsupported else "holds"
    grown = sum(facts["quotas_grown"])
    return [
        *_heterogeneity_lines(plan, facts),
        f"support assumption {assumption}",
        f"quotas grown       {grown} labels, so that every class has a supporter",
        f"idle cells         {facts['idle_cells']} of {facts['cells']}",
        f"untaught cells     {facts['untaught_cells']}, where the task is current before any client had data of it",
        f"empty clients      {facts['empty_clients']} of {plan.clients} own no data at any position",
        f"samples            {facts['samples']}",
        *_rare_lines(facts),
        *_growth_lines(facts),
    ]


def _rare_lines(facts: dict[str, Any]) -> list[str]:
    """The classes with few training examples."""
    if "rare_classes" not in facts:
        return []
    ids = " ".join(str(y) for y in facts["rare_classes"])
    return [f"rare classes       {ids}, with up to {facts['rare_examples']} training examples each"]


def _growth_lines(facts: dict[str, Any]) -> list[str]:
    """Who joined and which tasks were declared after the start. Tasks and positions are counted from 1."""
    joined = [f"client {c} from position {p + 1}" for c, p in facts.get("joined_later", {}).items()]
    declared = [f"task {int(t) + 1} from position {p + 1}" for t, p in facts.get("declared_later", {}).items()]
    lines = [f"joined later       {', '.join(joined)}"] if joined else []
    return [*lines, f"declared later     {', '.join(declared)}"] if declared else lines


def _heterogeneity_lines(plan: Plan, facts: dict[str, Any]) -> list[str]:
    """Realised support, coverage and disorder beside what was set."""
    settings = plan.settings
    support = _range(facts["support"])
    coverage = _range(facts["coverage"])
    disorder = facts["disorder"]
    return [
        f"support            {support} of the clients per task (set: {settings.support:g})",
        f"coverage           {coverage} of a task's labels per supporter (set: {settings.coverage:g})",
        f"disorder           {disorder:.3f} of the cells differ from the shared order "
        f"(set: {settings.disorder:g}, {facts['sampler']})",
    ]


def _range(values: list[float]) -> str:
    return f"{min(values):.3f} to {max(values):.3f}"
