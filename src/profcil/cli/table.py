"""Print a table of the paper from run folders, with the paper's values beside ours.

The runs are those of the table's study under --out, or those given: run folders, or results stores. Values are mean and
standard deviation over seeds. The best value of each column is bold. PRO-MAX is tested against the best baseline over
common seeds. Missing runs are shown as missing. Rows of a store with other settings than the study's name them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json, print_warning
from profcil.cli.study import add_selection_flags, selected_studies
from profcil.errors import unknown


def add(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="table of the paper; `profcil table list` lists them")
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run folders or results stores, instead of the study's runs"
    )
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="folder of the study's runs (runs/study)")
    parser.add_argument("--format", default="markdown", help="markdown, latex or csv (markdown)")
    add_selection_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.formats import FORMATS
    from profcil.reporting.grid import build_table
    from profcil.reporting.layouts import LAYOUTS
    from profcil.reporting.table_entries import items_of_runs, items_of_studies, plain_rows

    if args.name == "list":
        print("\n".join(f"{name}: {layout.title}" for name, layout in LAYOUTS.items()))
        return 0
    if args.name not in LAYOUTS:
        raise unknown("table", args.name, LAYOUTS)
    if args.format not in FORMATS:
        raise unknown("format", args.format, FORMATS)
    layout = LAYOUTS[args.name]
    if args.runs:
        items = items_of_runs(layout, args.runs, print_warning)
        excluded = sum(not layout.keep(item) for item in items)
        if excluded:
            print_warning(f"{excluded} of the given runs do not belong to this table and are left out")
    else:
        studies = [study for name in layout.studies for study in selected_studies(name, args)]
        items = items_of_studies(studies, Path(args.out))
    table = build_table(layout, items)
    if args.json:
        print_json(plain_rows(table))
    else:
        print(FORMATS[args.format](table).rstrip("\n"))
    return 0
