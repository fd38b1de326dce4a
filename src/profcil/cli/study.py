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

STORE = "results"  # of the working folder


def add(parser: Parser) -> None:
    parser.add_argument("study", help="built-in study or a TOML file")
    parser.add_argument("--out", metavar="DIR", default="runs/study", help="folder of the runs (runs/study)")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at the same time, one core each")
    parser.add_argument(
        "--launcher", default="local", help="local: run here; slurm: write a job array with a task per run (local)"
    )
    parser.add_argument(
        "--store", metavar="DIR", default=STORE, help=f"results store whose seconds say how long runs take ({STORE})"
    )
    parser.add_argument("--best", action="store_true", help="show only the best variant of each method, by mean FAA")
    parser.add_argument("--dry-run", action="store_true", help="only show what is done and how long the rest takes")
    add_selection_flags(parser)
    data_dir(parser)
    json_flag(parser)


def add_selection_flags(parser: Parser) -> None:
    """Flags that change or reduce a study; `table` has the same."""
    parser.add_argument(
        "--scale", default="paper", help="paper; short: the first seed only; smoke: tiny runs on digits (paper)"
    )
    parser.add_argument("--seeds", help="only these seeds, e.g. 0,1")
    parser.add_argument("--methods", help="only these methods, e.g. fedavg,promax")
    parser.add_argument("--datasets", help="these datasets instead of the study's, e.g. clinc150")
    parser.add_argument("--device", help="torch device of all runs: cpu, cuda or cuda:N")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting of all runs"
    )


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.study_table import best_variants, summarise
    from profcil.studies.checks import group_notes
    from profcil.studies.definition import list_all_cells

    announce("reading the study")
    check_jobs(args.jobs)
    studies = selected_studies(args.study, args)
    cells = list_all_cells(studies)
    out = Path(args.out)
    for note in dict.fromkeys(note for study in studies for note in group_notes(study)):
        print(note, file=sys.stderr)
    if args.launcher != "local":
        return write_jobs(cells, args, any(study.diagnose for study in studies))
    failures = run_studies(studies, cells, args)
    tables = [summarise(cells_of, out) for cells_of in map(list_cells_of, studies)]
    if args.best:
        tables = [best_variants(rows) for rows in tables]
    if args.json:
        print_json([row for rows in tables for row in rows])
    else:
        print_tables(studies, tables)
        print(f"\nrun folders: {out}")
    return 1 if failures else 0


def list_cells_of(study: Any) -> list[Any]:
    from profcil.studies.definition import list_cells

    return list_cells(study)


def run_studies(studies: list[Any], cells: list[Any], args: argparse.Namespace) -> int:
    """Runs what is not finished, one study after another; the number of failed runs. Prints first what all of them
    need, so that missing data shows before the first run."""
    if len(studies) == 1:
        return run_missing(cells, args, studies[0].diagnose)
    if not print_work(cells, args):
        return 0
    failures = 0
    for study in studies:
        print(f"{study.title}:", file=sys.stderr)
        failures += run_missing(list_cells_of(study), args, study.diagnose)
    return failures


def print_tables(studies: list[Any], tables: list[list[dict[str, Any]]]) -> None:
    """The table of each study, below its title if there are several."""
    from profcil.reporting.study_table import table_cells, table_text

    texts = []
    for study, rows in zip(studies, tables, strict=True):
        heading = f"{study.title}\n\n" if len(studies) > 1 else ""
        texts.append(heading + table_text(*table_cells(rows)))
    print("\n\n".join(texts))


def write_jobs(cells: list[Any], args: argparse.Namespace, diagnose: bool) -> int:
    """Writes the unfinished runs as a job array, and prints how to start it."""
    from profcil.studies.checks import missing_data
    from profcil.studies.launcher import LAUNCHERS, write_array

    if args.launcher not in LAUNCHERS:
        raise unknown("launcher", args.launcher, LAUNCHERS)
    out = Path(args.out)
    print(describe_work(cells, args), file=sys.stderr)
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


def selected_studies(name: str, args: argparse.Namespace) -> list[Any]:
    """A study, or those that it names, at the scale and with the changes that the flags ask for."""
    from profcil.studies.selection import parse_seeds, select_studies, split_names

    seeds = parse_seeds(args.seeds)
    sets = [*args.set, f"device={args.device}"] if args.device else args.set
    return select_studies(name, args.scale, seeds, split_names(args.methods), split_names(args.datasets), sets)


def run_missing(cells: list[Any], args: argparse.Namespace, diagnose: bool = False) -> int:
    """Runs the unfinished cells and writes the mismatch files; the number of failed runs.

    Before anything is run, and with --dry-run alone, prints how many runs there are and which data they lack.
    """
    from profcil.cli.board import show_progress
    from profcil.cli.main import main
    from profcil.diagnostics.mismatch import write_mismatch
    from profcil.studies.definition import check_data
    from profcil.studies.scheduler import run_cells

    if not print_work(cells, args):
        return 0
    out = Path(args.out)
    data = data_root(args)
    out.mkdir(parents=True, exist_ok=True)
    check_data(cells, out, data)
    with show_progress(cells, out, args.jobs) as report:
        failures = run_cells(cells, out, data, args.jobs, diagnose, report, main)
    write_mismatch(cells, out)
    return failures


def print_work(cells: list[Any], args: argparse.Namespace) -> bool:
    """Prints how many runs there are, and refuses missing data. Whether to run them: not with --dry-run."""
    from profcil.studies.checks import missing_data

    out = Path(args.out)
    print(describe_work(cells, args), file=sys.stderr)
    lacking = missing_data(cells, out, data_root(args))
    if lacking and not args.dry_run:
        raise DataError(lacking)
    if lacking:
        print(lacking, file=sys.stderr)
    return not args.dry_run


def describe_work(cells: list[Any], args: argparse.Namespace) -> str:
    """How many runs are done, how many are missing, and how long those will take."""
    from profcil.cli.progress import clock_time
    from profcil.studies.definition import is_finished
    from profcil.studies.estimates import estimate_seconds
    from profcil.studies.scheduler import is_not_applicable

    out = Path(args.out)
    by_name = {cell.name: cell for cell in cells}
    applicable = [cell for cell in by_name.values() if not is_not_applicable(out, cell)]
    missing = [cell for cell in applicable if not is_finished(out, cell)]
    parts = [f"{count(len(applicable), 'run')}, {len(missing)} of them to do, in {out}"]
    if len(applicable) < len(by_name):
        parts.append(f"{len(by_name) - len(applicable)} not applicable")
    if missing:
        seconds, unknown = estimate_seconds(missing, out, args.jobs, Path(args.store))
        known = len(missing) - unknown
        if known:
            parts.append(f"about {clock_time(seconds)} for {known} of them")
        if unknown:
            parts.append(f"no estimate for {unknown}, because no similar run is finished there or in the results store")
    return "; ".join(parts)
