"""Put runs on one HTML page: summary, curves, heatmaps, traffic, the stream, settings, and what differs.

The page is one file without any reference outside itself. A folder of runs (a study's) stands for all runs in it. A
run that is not finished is shown as such; a folder that cannot be read is left out, named here and on the page.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    parser.add_argument("--out", default="page.html", metavar="FILE", help="the page (page.html)")
    parser.add_argument("--title", default="profcil runs", help="heading of the page")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.page.page import render, write
    from profcil.runs.gather import load_runs

    notes: list[str] = []
    runs = load_runs(args.runs, notes.append)
    for note in notes:
        print(note, file=sys.stderr)
    write(Path(args.out), render(runs, args.title, notes))
    facts = {"page": args.out, "runs": len(runs), "left_out": len(notes)}
    print_json(facts) if args.json else print(f"{args.out}: {len(runs)} runs")
    return 0
