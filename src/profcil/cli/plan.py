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
    config = resolve_args(args)
    weakened = plan_of(config, data_root(args))
    plan = weakened.plan
    schedule = schedule_of(config, weakened)
    if args.json:
        facts = {"tasks": plan.tasks, "orders": plan.orders.tolist(), "audit": plan.audit(), "digest": plan.digest}
        print_json(facts | ({"schedule": schedule.facts()} if schedule else {}))
    else:
        print("\n".join([plan.describe(args.limit), *(schedule.lines() if schedule else ())]))
    return 0


def plan_of(config: Any, data: Path) -> Any:
    """The plan of a run with this configuration, and its weakened epochs. No model is built."""
    from profcil.engine.world import draw_plan, load_data
    from profcil.protocol.weak_task import weakened

    bundle = load_data(config, data)
    return weakened(draw_plan(config, bundle), bundle.train.y.numpy(), config.stream)


def schedule_of(config: Any, weakened: Any) -> Any:
    """The schedule of simulated clocks; None without clocks."""
    if config.clock.mode == "off":
        return None
    from profcil import registry
    from profcil.engine.arrivals import planned_work
    from profcil.engine.late import check_clock
    from profcil.protocol.buffered_clock import BufferedClock
    from profcil.protocol.clock_schedule import Schedule

    method = registry.find("methods", config.method).METHOD(config.params)
    check_clock(config, method)
    clock = BufferedClock(config.clock, weakened.plan, config.train.epochs, weakened.epochs_factor)
    return Schedule(clock, config.train.rounds, planned_work(method, config.train.rounds))
