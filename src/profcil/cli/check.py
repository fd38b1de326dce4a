"""Test a method against the contract of all methods, on tiny streams.

METHOD is a built-in method, a plug-in or a file (./mine.py). The streams consist of digits, and of a few generated
texts, nodes and rows if the method supports them. Nothing is downloaded or stored. The exit status is 1
if a promise does not hold.
"""

from __future__ import annotations

import argparse

from profcil.cli.parser import Parser, json_flag, print_json
from profcil.errors import unknown


def add(parser: Parser) -> None:
    parser.add_argument("method", metavar="METHOD", help="method to test (`profcil list methods`)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry

    if args.method not in registry.names("methods") and not registry.is_file_name(args.method):
        raise unknown("method", args.method, registry.names("methods"))
    from profcil.contract.check import check

    rows = []
    for row in check(args.method):
        rows.append(row)
        if not args.json:
            print(describe(row), flush=True)
    if args.json:
        print_json(rows)
    return 1 if any(row["holds"] is False for row in rows) else 0


def describe(row: dict) -> str:
    """One line for one promise."""
    mark = {True: "holds", False: "DOES NOT HOLD", None: "not tested"}[row["holds"]]
    data = f"{row['data']}: " if row["data"] else ""
    reason = f" ({row['why_not']})" if row["why_not"] else ""
    return f"{mark:<14} {data}{row['promise']}{reason}"
