"""Show the status of a run: who is left out, position, round, replies by client, bytes, last scores."""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder; the run may be running, stopped or done")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.deploy.status import describe, status

    found = status(Path(args.run))
    if args.json:
        print_json(found)
    else:
        print(describe(found))
    return 0
