"""Continue a stopped run from its last saved state."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, json_flag, progress_flags
from profcil.errors import ProfcilError


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder that `profcil run` printed")
    data_dir(parser, "--data")
    progress_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Resumes, or prints the results of a finished run. Without --data-dir the data folder is that of the run."""
    from profcil.cli.run import run_and_show, show

    path = Path(args.run)
    given = Path(args.data_dir) if args.data_dir else None
    if finished(path):
        add_model(path, given)
        show(path, args.json)
        return 0
    from profcil.deploy.sites.simulation import make_world
    from profcil.engine.run import resume

    run_and_show(lambda observe: resume(path, given, observe, make_world), path, args)
    return 0


def add_model(path: Path, data_dir: Path | None) -> None:
    """Writes the model of a finished run that lacks one, as runs of older versions do, if its data is there."""
    from profcil.runs.models.saved_model import NAME

    if not (path / NAME).exists():
        from profcil.deploy.sites.simulation import make_world
        from profcil.engine.run import resume

        with suppress(ProfcilError):  # its results are shown in any case
            resume(path, data_dir, make=make_world)


def finished(path: Path) -> bool:
    """Whether a run is finished. If its readable files are damaged it is not: resuming rewrites them from the state."""
    from profcil.runs.reader import load_run
    from profcil.runs.run_files import read_alignments

    try:
        return load_run(path).done and bool(read_alignments(path))
    except (ProfcilError, OSError, ValueError, KeyError, TypeError):
        return False
