"""Go back to an earlier state of a run, kept at the end of a position.

A run keeps states if it is made with --set keep_states=N; N may be changed in config.toml before it is resumed.
Everything after the chosen position is removed from the run's files. `profcil resume RUN` then computes it again; a
deployment is continued by its app. Sites have their private tensors of the last two turns only: a site whose tensors
are gone begins without them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder")
    parser.add_argument("--to", type=int, metavar="POSITION", help="state after this position, from 1 (the last kept)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.runs.rollback import roll_back

    found = roll_back(Path(args.run), args.to)
    if args.json:
        print_json(found)
        return 0
    print(f"{args.run} is as it was after position {found['position']}; continue with `profcil resume {args.run}`")
    kept = ", ".join(map(str, found["kept"]))
    print(f"kept states after positions {kept}: {found['kept_bytes'] / 1e6:.1f} MB")
    return 0
