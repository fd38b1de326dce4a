"""Print a table of the paper from run folders, the paper's figure beside ours.

The runs are those of the table's study under --out, or the folders given. Mean and standard deviation are over seeds,
the best of each column is bold, PRO-MAX is tested against the best baseline over common seeds, and what is missing is
shown as missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, json_flag, print_json
from profcil.cli.study import narrowing
from profcil.errors import unknown


def add(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="table of the paper; `profcil table list` names them")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders, instead of those of the study")
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="where the study's runs lie (runs/study)")
    parser.add_argument("--format", default="markdown", help="markdown, latex or csv (markdown)")
    narrowing(parser)
    json_flag(parser)


def planned(names: Sequence[str], args: argparse.Namespace) -> list[Any]:
    """The studies of a table, narrowed by the flags."""
    from profcil.studies.selection import select_study

    return [select_study(name, args.scale, args.seeds, args.methods, args.datasets, args.set) for name in names]


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.formats import FORMATS
    from profcil.reporting.grid import build
    from profcil.reporting.layouts import LAYOUTS
    from profcil.reporting.table_entries import of_runs, of_study, plain_rows

    if args.name == "list":
        print("\n".join(f"{name}: {layout.title}" for name, layout in LAYOUTS.items()))
        return 0
    if args.name not in LAYOUTS:
        raise unknown("table", args.name, LAYOUTS)
    if args.format not in FORMATS:
        raise unknown("format", args.format, FORMATS)
    layout = LAYOUTS[args.name]
    if args.runs:
        items = of_runs(layout, [Path(r) for r in args.runs])
    else:
        items = of_study(planned(layout.studies, args), Path(args.out))
    left_out = [item for item in items if not layout.keep(item)] if args.runs else []
    if left_out:
        print(f"{len(left_out)} of the given runs do not belong to this table and are left out", file=sys.stderr)
    table = build(layout, items)
    print_json(plain_rows(table)) if args.json else print(FORMATS[args.format](table).rstrip("\n"))
    return 0
