"""Hold a method to the contract of all methods, on tiny streams: what it promises, and whether that holds.

METHOD is a method of this package or one that another installed package brings. The streams are of digits, and of a few
made-up texts and nodes where the method is for these. Nothing is downloaded or kept. The exit status is 1 where
something does not hold.
"""

from __future__ import annotations

import argparse

from profcil.cli.parser import Parser, json_flag, print_json
from profcil.errors import unknown


def add(parser: Parser) -> None:
    parser.add_argument("method", metavar="METHOD", help="method to look at (`profcil list methods`)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil import registry

    if args.method not in registry.names("methods"):
        raise unknown("method", args.method, registry.names("methods"))
    from profcil.contract.promises import check

    rows = []
    for found in check(args.method):
        rows.append(found)
        if not args.json:
            print(line(found), flush=True)
    if args.json:
        print_json(rows)
    return 1 if any(row["holds"] is False for row in rows) else 0


def line(row: dict) -> str:
    mark = {True: "holds", False: "DOES NOT HOLD", None: "not looked at"}[row["holds"]]
    data = f"{row['data']}: " if row["data"] else ""
    return f"{mark:<14} {data}{row['promise']}" + (f" ({row['why_not']})" if row["why_not"] else "")
