"""Write an HTML page about runs: which method is best, at what traffic, and why; then every run.

It has a ranking for each dataset and setting, accuracy against bytes, curves over positions, forgetting and alignment,
the table of runs, heatmaps, traffic by kind, the stream, settings and differences.

The page is one file that loads nothing else. A folder of runs (a study's) stands for all runs in it, a results store
or one of its CSV files for its rows. Unfinished runs are marked. A folder that cannot be read is left out, with a
message here and on the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, count, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, folders of runs, or results stores")
    parser.add_argument("--out", default="page.html", metavar="FILE", help="file to write (page.html)")
    parser.add_argument("--title", default="profcil runs", help="heading of the page")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.page.page import render_page, write_page
    from profcil.runs.gather import load_runs

    warnings: list[str] = []
    runs = load_runs(args.runs, warnings.append, with_scores=False)
    for warning in warnings:
        print(warning, file=sys.stderr)
    write_page(Path(args.out), render_page(runs, args.title, warnings))
    if args.json:
        print_json({"page": args.out, "runs": len(runs), "left_out": len(warnings)})
    else:
        print(f"{args.out}: {count(len(runs), 'run')}")
    return 0
