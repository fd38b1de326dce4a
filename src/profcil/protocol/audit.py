"""What a plan really came to, as numbers and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from profcil.protocol.heterogeneity import growth, share_of

if TYPE_CHECKING:
    from profcil.protocol.plan import Plan


def audit(plan: Plan) -> dict[str, Any]:
    """Realised support, coverage and disorder, the support assumption, and every cell without data, as plain values."""
    missing = sorted({y for task in plan.tasks for y in task} - set(np.unique(plan.labels).tolist()))
    drawn = share_of(plan.settings.support, plan.clients)
    return {
        "sampler": plan.settings.sampler,
        "support": _support(plan).tolist(),
        "coverage": _coverage(plan).tolist(),
        "disorder": float((plan.orders != np.arange(plan.positions)).mean()),
        "support_assumption": not missing,
        "unsupported_classes": missing,
        "quotas_grown": [growth(drawn, len(task), plan.settings.coverage) for task in plan.tasks],
        "cells": int(plan.orders.size),
        "idle_cells": int((plan.counts == 0).sum()),
        "untaught_cells": untaught(plan),
        "empty_clients": int((~plan.counts.any(axis=1)).sum()),
        "samples": len(plan.ids),
    }


def _support(plan: Plan) -> np.ndarray:
    """|C_t| / C per task."""
    shares: np.ndarray = (plan.counts > 0).mean(axis=0)
    return shares


def _coverage(plan: Plan) -> np.ndarray:
    """Observed labels over the task's labels, averaged over the clients with data of the task."""
    labels = np.diff(plan.label_starts).reshape(plan.orders.shape).sum(axis=0)
    supporters = np.maximum(1, (plan.counts > 0).sum(axis=0))
    shares: np.ndarray = labels / supporters / np.array([len(task) for task in plan.tasks])
    return shares


def untaught(plan: Plan) -> int:
    """Cells (client, position) whose task nobody has had data of up to that position: CTA counts them all the same."""
    position_of = np.argsort(plan.orders, axis=1, kind="stable")  # p_c(t), the inverse of the order
    first = np.where(plan.counts > 0, position_of, plan.positions).min(axis=0)
    return int((first[plan.orders] > np.arange(plan.positions)).sum())


def describe(plan: Plan, limit: int = 20) -> str:
    """A header, the tasks' classes, a table of clients by positions (idle cells in brackets), and the audit."""
    head = (
        f"plan {plan.digest}: seed {plan.seed}, {plan.clients} clients, {plan.settings.participants} per round, "
        f"{plan.positions} tasks"
    )
    tasks = [f"task {t}: classes {' '.join(map(str, task))}" for t, task in enumerate(plan.tasks)]
    return "\n".join([head, "", *_cut(tasks, limit, "tasks"), "", *_table(plan, limit), "", *_facts(plan)])


def _table(plan: Plan, limit: int) -> list[str]:
    shown = range(min(plan.clients, max(0, limit)))
    names = [f"p{p}" for p in range(plan.positions)]
    rows = [(str(c), [_cell(plan, c, p) for p in range(plan.positions)]) for c in shown]
    rest = [f"... and {plan.clients - len(shown)} more clients"] if len(shown) < plan.clients else []
    lines = [f"{name:>8}" + "".join(f"{text:>7}" for text in cells) for name, cells in [("client", names), *rows]]
    return ["which task a client meets at which position; (t) is idle: no data", *lines, *rest]


def _cell(plan: Plan, client: int, position: int) -> str:
    task = plan.orders[client, position]
    return str(task) if plan.counts[client, task] else f"({task})"


def _cut(lines: list[str], limit: int, what: str) -> list[str]:
    rest = len(lines) - max(0, limit)
    return lines if rest <= 0 else [*lines[: max(0, limit)], f"... and {rest} more {what}"]


def _facts(plan: Plan) -> list[str]:
    facts = plan.audit()
    span = {key: f"{min(facts[key]):.3f} to {max(facts[key]):.3f}" for key in ("support", "coverage")}
    missing = facts["unsupported_classes"]
    return [
        f"support            {span['support']} of the clients per task (set: {plan.settings.support:g})",
        f"coverage           {span['coverage']} of a task's labels per supporter (set: {plan.settings.coverage:g})",
        f"disorder           {facts['disorder']:.3f} of the cells off the shared order "
        f"(set: {plan.settings.disorder:g}, {facts['sampler']})",
        f"support assumption {'holds' if not missing else f'broken by classes {missing}'}",
        f"quotas grown       {sum(facts['quotas_grown'])} labels, so that every class has a supporter",
        f"idle cells         {facts['idle_cells']} of {facts['cells']}",
        f"untaught cells     {facts['untaught_cells']}: current for a client before anyone had data of the task",
        f"empty clients      {facts['empty_clients']} of {plan.clients} own no data at any position",
        f"samples            {facts['samples']}",
    ]
