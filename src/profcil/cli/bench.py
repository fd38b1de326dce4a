"""Measure what rounds and streams cost on this machine, against a reference in the same run.

Every case has a process of its own. Cases for a GPU come first where one is used; the rest needs none. Times of streams
leave out the shared warm-up. A ratio is the reference's time divided by ours; for a growing number of clients or
classes the reference is the smallest. Resident memory is shown after the first and the last position, so that growth
over rounds, tasks and clients would be seen.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, data_root, print_json


def add(parser: Parser) -> None:
    parser.add_argument("only", nargs="*", help="only cases whose name contains one of these words")
    parser.add_argument("--device", help="torch device: cpu, cuda or cuda:N; a GPU where there is one")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write rows and machine to FILE; `-` prints nothing else"
    )
    data_dir(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.bench import table
    from profcil.io.atomic_files import write_json

    rows = []
    for row in table.measure(args.only, data_root(args), device(args.device)):
        rows.append(row)
        print(table.render([row]).splitlines()[-1], file=sys.stderr, flush=True)
    if args.json == "-":
        print_json(table.report(rows))
    else:
        print(table.render(rows))
        if args.json:
            write_json(Path(args.json), table.report(rows))
    return int(any(row.get("failed") for row in rows))


def device(asked: str | None) -> str:
    """The one asked for, if it can be used; else a GPU where there is one."""
    import torch

    from profcil.engine.world import device_of

    return str(device_of(asked)) if asked else "cuda" if torch.cuda.is_available() else "cpu"
