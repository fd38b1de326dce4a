"""Show who meets which task when, and an audit of it, without training anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, data_root, json_flag, print_json, resolved, selection


def add(parser: Parser) -> None:
    selection(parser)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="tasks and clients to print (20)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    plan = plan_of(resolved(args), data_root(args))
    if args.json:
        print_json({"tasks": plan.tasks, "orders": plan.orders.tolist(), "audit": plan.audit(), "digest": plan.digest})
    else:
        print(plan.describe(args.limit))
    return 0


def plan_of(config: Any, data: Path) -> Any:
    """The plan that a run of this configuration would have; no model is built for it."""
    from profcil.data.loading import load_bundle
    from profcil.engine.world import held_out
    from profcil.protocol.plan import make_plan
    from profcil.protocol.weak_task import weakened

    bundle = held_out(load_bundle(config.dataset, data, config.seed), config)
    labels = bundle.train.y.numpy()
    return weakened(make_plan(labels, bundle.facts.classes, config.stream, config.seed), labels, config.stream).plan
