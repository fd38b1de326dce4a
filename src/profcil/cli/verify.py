"""Check that the files of runs are what the runs wrote, and that they agree with each other.

Every file is compared with its digest in run.json; scores, metrics, bytes, plan, settings and the saved state are
compared with each other. A folder of runs (a study's) stands for all runs in it. Prints one line per fault, and ends
with status 1 if there is any. Runs of versions before 0.4.0 have no digests; the rest is checked.
"""

from __future__ import annotations

import argparse

from profcil.cli.parser import Parser, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.runs.gather import find_run_folders
    from profcil.runs.verify import find_faults

    rows = [{"run": str(path), "faults": find_faults(path)} for path in find_run_folders(args.runs)]
    if args.json:
        print_json([{**row, "ok": not row["faults"]} for row in rows])
    else:
        for row in rows:
            print("\n".join(row["faults"]) if row["faults"] else f"{row['run']}: ok")
    return int(any(row["faults"] for row in rows))
