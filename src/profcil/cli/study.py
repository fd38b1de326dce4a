"""Run all unfinished runs of a study, and print its table.

A study is a TOML file with datasets, settings, methods, seeds and variants, built in or written by you. Finished runs
are reused, interrupted runs are resumed, failed runs are reported. The table shows the results so far and the number
of seeds behind each; in a pipe it is Markdown. `profcil table NAME --out DIR` prints the paper's layout from the same
runs. If the variants are candidates evaluated on validation data, `--best` shows the best one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, announce, data_dir, data_root, json_flag, print_json
from profcil.errors import ConfigError, DataError, count, unknown


def add(parser: Parser) -> None:
    parser.add_argument("study", help="built-in study or a TOML file")
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="folder of the runs (runs/study)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time, one core each")
    parser.add_argument(
        "--launcher", default="local", help="local: run here; slurm: write a job array with a task per run (local)"
    )
    parser.add_argument("--best", action="store_true", help="show only the best variant of each method, by mean FAA")
    parser.add_argument("--dry-run", action="store_true", help="only show what is done and how long the rest takes")
    add_selection_flags(parser)
    data_dir(parser)
    json_flag(parser)


def add_selection_flags(parser: Parser) -> None:
    """Flags that change or reduce a study; `table` has the same."""
    parser.add_argument("--scale", default="paper", help="paper, or smoke: tiny runs on digits (paper)")
    parser.add_argument("--seeds", help="only these seeds, e.g. 0,1")
    parser.add_argument("--methods", help="only these methods, e.g. fedavg,promax")
    parser.add_argument("--datasets", help="these datasets instead of the study's, e.g. clinc150")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting of all runs"
    )


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.study_table import best_variants, summarise, table_cells, table_text
    from profcil.studies.checks import group_notes
    from profcil.studies.definition import list_cells

    announce("reading the study")
    check_jobs(args.jobs)
    study = selected_study(args.study, args)
    cells = list_cells(study)
    out = Path(args.out)
    for note in group_notes(study):
        print(note, file=sys.stderr)
    if args.launcher != "local":
        return write_jobs(cells, args, study.diagnose)
    failures = run_missing(cells, args, study.diagnose)
    rows = summarise(cells, out)
    if args.best:
        rows = best_variants(rows)
    if args.json:
        print_json(rows)
    else:
        print(f"{table_text(*table_cells(rows))}\n\nrun folders: {out}")
    return 1 if failures else 0


def write_jobs(cells: list[Any], args: argparse.Namespace, diagnose: bool) -> int:
    """Writes the unfinished runs as a job array, and says how to start it."""
    from profcil.studies.checks import missing_data
    from profcil.studies.launcher import LAUNCHERS, write_array

    if args.launcher not in LAUNCHERS:
        raise unknown("launcher", args.launcher, LAUNCHERS)
    out = Path(args.out)
    print(describe_work(cells, out, args.jobs), file=sys.stderr)
    if lacking := missing_data(cells, out, data_root(args)):
        print(lacking, file=sys.stderr)  # the nodes of a cluster may have what this machine lacks
    script = None if args.dry_run else write_array(cells, out, data_root(args), args.jobs, diagnose)
    if args.json:
        print_json({"script": None if script is None else str(script)})
    elif script is not None:
        print(f"start the runs with `sbatch {script}`, then show them with the same command without --launcher")
    return 0


def check_jobs(jobs: int) -> None:
    if jobs < 1:
        raise ConfigError(f"--jobs is {jobs}, allowed is at least 1; leave it out for one run at a time")


def selected_study(name: str, args: argparse.Namespace) -> Any:
    """A study at the scale, and with the changes, that the flags ask for."""
    from profcil.studies.selection import select_study

    return select_study(name, args.scale, args.seeds, args.methods, args.datasets, args.set)


def run_missing(cells: list[Any], args: argparse.Namespace, diagnose: bool = False) -> int:
    """Runs the unfinished cells and writes the mismatch files; the number of failed runs.

    With --dry-run, and before anything is run, says how many runs there are and which data they lack.
    """
    from profcil.cli.board import show_progress
    from profcil.cli.main import main
    from profcil.diagnostics.mismatch import write_mismatch
    from profcil.studies.checks import missing_data
    from profcil.studies.definition import check_data
    from profcil.studies.scheduler import run_cells

    out = Path(args.out)
    data = data_root(args)
    print(describe_work(cells, out, args.jobs), file=sys.stderr)
    lacking = missing_data(cells, out, data)
    if args.dry_run:
        if lacking:
            print(lacking, file=sys.stderr)
        return 0
    if lacking:
        raise DataError(lacking)
    out.mkdir(parents=True, exist_ok=True)
    check_data(cells, out, data)
    with show_progress(cells, out, args.jobs) as report:
        failures = run_cells(cells, out, data, args.jobs, diagnose, report, main)
    write_mismatch(cells, out)
    return failures


def describe_work(cells: list[Any], out: Path, jobs: int) -> str:
    """How many runs are done, how many are missing, and how long those will take."""
    from profcil.cli.progress import clock_time
    from profcil.studies.definition import is_finished
    from profcil.studies.scheduler import estimate_seconds, is_not_applicable

    by_name = {cell.name: cell for cell in cells}
    applicable = [cell for cell in by_name.values() if not is_not_applicable(out, cell)]
    missing = [cell for cell in applicable if not is_finished(out, cell)]
    parts = [f"{count(len(applicable), 'run')}, {len(missing)} of them to do, in {out}"]
    if len(applicable) < len(by_name):
        parts.append(f"{len(by_name) - len(applicable)} not applicable")
    if missing:
        seconds, unknown = estimate_seconds(missing, out, jobs)
        known = len(missing) - unknown
        if known:
            parts.append(f"about {clock_time(seconds)} for {known} of them")
        if unknown:
            parts.append(f"no estimate for {unknown}, because no similar run is finished")
    return "; ".join(parts)
