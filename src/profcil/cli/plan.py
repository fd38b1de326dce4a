"""Show which client gets which task when, with an audit, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, data_root, json_flag, print_json, resolve_args, selection_flags


def add(parser: Parser) -> None:
    selection_flags(parser)
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="tasks and clients to print (20)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    plan = plan_of(resolve_args(args), data_root(args))
    if args.json:
        print_json({"tasks": plan.tasks, "orders": plan.orders.tolist(), "audit": plan.audit(), "digest": plan.digest})
    else:
        print(plan.describe(args.limit))
    return 0


def plan_of(config: Any, data: Path) -> Any:
    """The plan of a run with this configuration. No model is built."""
    from profcil.engine.world import draw_plan, load_data
    from profcil.protocol.weak_task import weakened

    bundle = load_data(config, data)
    return weakened(draw_plan(config, bundle), bundle.train.y.numpy(), config.stream).plan
