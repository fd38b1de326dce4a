"""Measure the time of rounds and streams on this machine, relative to a reference in the same run.

Every case runs in its own process. Cases for a GPU come first if one is used; the others run on the CPU. Times of
streams exclude the shared warm-up. A ratio is the time of the reference divided by the time of profcil; for a growing
number of clients or classes the reference is the smallest number. Resident memory is measured after the first and
after the last position, which shows growth over rounds, tasks and clients.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, data_root, print_json


def add(parser: Parser) -> None:
    parser.add_argument("only", nargs="*", help="only cases whose name contains one of these words")
    parser.add_argument("--device", help="torch device: cpu, cuda or cuda:N (a GPU if available)")
    parser.add_argument(
        "--peer-python",
        default="",
        metavar="PATH",
        help="a Python with pfl or Flower, for the cases `peers` (this one)",
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write rows and machine to FILE; `-` prints only JSON"
    )
    data_dir(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.bench import table
    from profcil.io.atomic_files import write_json

    rows = []
    for row in table.measure(args.only, data_root(args), choose_device(args.device), args.peer_python):
        rows.append(row)
        print(table.render([row]).splitlines()[-1], file=sys.stderr, flush=True)
    if args.json == "-":
        print_json(table.report(rows))
    else:
        print(table.render(rows))
        if args.json:
            write_json(Path(args.json), table.report(rows))
    return int(any(row.get("failed") for row in rows))


def choose_device(requested: str | None) -> str:
    """The requested device, which must be usable; by default a GPU if there is one."""
    import torch

    from profcil.engine.device import device_of

    if requested:
        return str(device_of(requested))
    return "cuda" if torch.cuda.is_available() else "cpu"
