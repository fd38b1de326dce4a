"""Measure full streams and a large plan on this machine.

Times exclude the shared warm-up, which has a column of its own; resident memory is shown after the first and the last
position, so that growth over rounds would be seen.
"""

from __future__ import annotations

import argparse

from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json

COLUMNS = {
    "seconds": "seconds",
    "warmup_seconds": "warm-up s",
    "peak_memory_mb": "peak MB",
    "resident_first_mb": "MB at first position",
    "resident_last_mb": "MB at last position",
}


def add(parser: Parser) -> None:
    parser.add_argument("only", nargs="*", help="only cases whose name contains one of these words")
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.bench.streams import cases
    from profcil.reporting.tables import text_table

    found = {
        name: case
        for name, case in cases(data_root(args)).items()
        if not args.only or any(w in name for w in args.only)
    }
    results = {name: case() for name, case in found.items()}
    if args.json:
        print_json(results)
        return 0
    rows = [[name, *(_number(r.get(key)) for key in COLUMNS), r.get("note", "")] for name, r in results.items()]
    print(text_table(["case", *COLUMNS.values(), ""], rows))
    return 0


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
