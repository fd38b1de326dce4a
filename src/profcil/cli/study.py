"""Run every cell of a study that is not there yet, and print its table.

A study is a TOML of datasets, settings, methods, seeds and variants, built in or your own. Finished runs are reused,
broken-off ones resumed, failed ones reported; the table shows what there is and how many seeds stand behind it.
`profcil table NAME --out DIR` prints the paper's layout from the same runs. Where variants are candidates on
validation data, `--best` says which one to take.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, data_dir, data_root, json_flag, print_json
from profcil.errors import ConfigError


def add(parser: Parser) -> None:
    parser.add_argument("study", help="built-in study or a TOML file")
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="where the runs lie (runs/study)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time, each on one core")
    parser.add_argument("--best", action="store_true", help="show each method's best variant only, by mean FAA")
    parser.add_argument("--dry-run", action="store_true", help="only say what is there, what is missing, how long")
    narrowing(parser)
    data_dir(parser)
    json_flag(parser)


def narrowing(parser: Parser) -> None:
    """What makes a study smaller or moves it; `table` has the same flags."""
    parser.add_argument("--scale", default="paper", help="paper, or smoke: tiny runs on digits (paper)")
    parser.add_argument("--seeds", help="only these seeds, e.g. 0,1")
    parser.add_argument("--methods", help="only these methods, e.g. fedavg,promax")
    parser.add_argument("--datasets", help="these datasets instead of the study's, e.g. clinc150")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting of all runs"
    )


def run(args: argparse.Namespace) -> int:
    from profcil.cli.board import watching
    from profcil.cli.main import main
    from profcil.diagnostics.mismatch import write_mismatch
    from profcil.reporting.study_table import best, markdown, summarise
    from profcil.studies.definition import cells, check_data
    from profcil.studies.scheduler import play

    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}, allowed is at least 1; leave it out for one run at a time")
    study = chosen(args)
    todo, out = cells(study), Path(args.out)
    for why in left_out(study):
        print(f"left out: {why}", file=sys.stderr)
    print(outlook(todo, out, args.jobs), file=sys.stderr)
    failures = 0
    if not args.dry_run:
        out.mkdir(parents=True, exist_ok=True)
        check_data(todo, out, data_root(args))
        with watching(todo, out, args.jobs) as tell:
            failures = play(todo, out, data_root(args), args.jobs, study.diagnose, tell, main)
        write_mismatch(todo, out)
    rows = best(summarise(todo, out)) if args.best else summarise(todo, out)
    print_json(rows) if args.json else print(f"{markdown(rows)}\n\nrun folders: {out}")
    return 1 if failures else 0


def chosen(args: argparse.Namespace) -> Any:
    """The study behind the flags."""
    from profcil.studies.selection import select_study

    return select_study(args.study, args.scale, args.seeds, args.methods, args.datasets, args.set)


def left_out(study: Any) -> list[str]:
    """Why methods of other packages are not in a study of a whole group of methods."""
    from profcil import registry

    grouped = any(isinstance(v.get("methods") or study.methods, str) for v in study.variants)
    return list(registry.broken("methods").values()) if grouped else []


def outlook(todo: list, out: Path, jobs: int) -> str:
    """What is there, what is missing and how long that would take."""
    from profcil.cli.progress import clock_time
    from profcil.studies.definition import finished
    from profcil.studies.scheduler import expected, misfit

    each = {c.name: c for c in todo}
    fit = [c for c in each.values() if not misfit(out, c)]
    missing = [c for c in fit if not finished(out, c)]
    head = f"{len(fit)} runs, {len(missing)} of them to do, in {out}"
    rest = [f"{len(each) - len(fit)} not applicable"] if len(fit) < len(each) else []
    if missing:
        seconds, unknown = expected(missing, out, jobs)
        known = len(missing) - unknown
        rest += [f"about {clock_time(seconds)} for {known} of them"] if known else []
        rest += [f"no finished run tells how long {unknown} will take"] if unknown else []
    return "; ".join([head, *rest])
