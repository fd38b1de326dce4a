"""Run every cell of a study that is not there yet, and print its table.

A study is a TOML of datasets, settings, methods, seeds and variants, built in or your own. Finished runs are reused,
broken-off ones resumed, failed ones reported; the table shows what there is and how many seeds stand behind it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json


def add(parser: Parser) -> None:
    parser.add_argument("study", help="built-in study or a TOML file")
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="where the runs lie (runs/study)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on one core")
    parser.add_argument("--seeds", help="only these seeds, e.g. 0,1")
    parser.add_argument("--methods", help="only these methods, e.g. fedavg,promax")
    parser.add_argument("--dry-run", action="store_true", help="only say what is there and what is missing")
    data_dir(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.study import markdown, summarise
    from profcil.study import cells, load_study, play, read_json

    study = load_study(args.study)
    todo = chosen(cells(study), args)
    out = Path(args.out)
    missing = [c for c in todo if not read_json(out / c.name / "run.json").get("done")]
    print(f"{len(todo)} runs, {len(missing)} of them to do, in {out}", file=sys.stderr)
    failures = 0
    if not args.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        failures = play(todo, out, data_root(args), args.jobs, study.diagnose, tell)
    rows = summarise(todo, out)
    print_json(rows) if args.json else print(f"{markdown(rows)}\n\nrun folders: {out}")
    return 1 if failures else 0


def chosen(todo: list, args: argparse.Namespace) -> list:
    seeds = {int(s) for s in args.seeds.split(",")} if args.seeds else None
    methods = set(args.methods.split(",")) if args.methods else None
    return [
        c for c in todo if (seeds is None or c.config.seed in seeds) and (methods is None or c.config.method in methods)
    ]


def tell(cell: object, what: str) -> None:
    print(f"{cell.name}: {what}", file=sys.stderr, flush=True)  # type: ignore[attr-defined]
