"""Attack a finished run: what its reports and its model reveal about single examples.

Three attackers who know the model and have test data: one who picks the input behind a report of a single example out
of a hundred, and rebuilds it; one who decides whether an example is in a report of five; one who decides from the final
model whether an example was trained on. The first two are tried without protection, with minimum support and with
noise. docs/privacy.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--trials", type=int, default=100, metavar="N", help="inputs that are attacked (100)")
    data_dir(parser, "--data")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry
    from profcil.deploy.sites.simulation import make_world
    from profcil.diagnostics.leakage import audit
    from profcil.diagnostics.report import load_finished_run
    from profcil.errors import ConfigError
    from profcil.reporting.tables import text_table

    if args.trials < 1:
        raise ConfigError(f"--trials {args.trials} is too few; give at least 1")
    folder = Path(args.run)
    world, state = load_finished_run(folder, Path(args.data_dir) if args.data_dir else None, make_world)
    method = registry.find("methods", world.config.method).METHOD(world.config.params)
    rows = audit(world, method, state, args.trials)
    if args.json:
        print_json(rows)
        return 0
    if len(rows) == 1:
        print(f"{world.config.method} sends no class means: only the final model was attacked.\n")
    columns = ("attack", "protection", "found", "verdict")
    print(text_table(list(columns), [[str(row[name]) for name in columns] for row in rows]))
    return 0
