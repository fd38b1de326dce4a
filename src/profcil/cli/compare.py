"""Compare finished runs in one table.

NormComm is the traffic of the incremental stream, divided by the traffic of the reference method's run with the same
dataset, setting and seed, or by its mean over seeds. Unfinished runs are listed without numbers. A folder of runs (a
study's) stands for all runs in it; files are skipped. A results store, or one of its CSV files, stands for its rows.
"""

from __future__ import annotations

import argparse

from profcil.cli.parser import Parser, json_flag, print_json, print_warning
from profcil.errors import unknown


def add(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, folders of runs, or results stores")
    parser.add_argument("--reference", default="fedavg", metavar="METHOD", help="method that NormComm is relative to")
    parser.add_argument(
        "--further", action="store_true", help="also show the worst client, the deviation over clients, and transfer"
    )
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry
    from profcil.reporting.tables import compare, render
    from profcil.runs.gather import load_all

    if args.reference not in registry.names("methods"):
        raise unknown("method", args.reference, registry.names("methods"))
    runs = load_all(args.runs, print_warning)
    if args.json:
        print_json(compare(runs, args.reference))
    else:
        print(render(runs, args.reference, args.further))
    return 0
