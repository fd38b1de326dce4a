"""Go on with a run that was stopped, from its last saved state."""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, data_dir, json_flag, progress_flags
from profcil.errors import ProfcilError


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder that `profcil run` named")
    data_dir(parser)
    progress_flags(parser)
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    """A finished run is only shown; the data is looked for where the run found it unless --data-dir says otherwise."""
    from profcil.cli.run import play, show

    path = Path(args.run)
    if finished(path):
        show(path, args.json)
        return 0
    from profcil.engine.run import resume

    given = Path(args.data_dir) if args.data_dir else None
    play(lambda observe: resume(path, given, observe), path, args)
    return 0


def finished(path: Path) -> bool:
    """Readable files that are broken are no obstacle: the saved state is the truth, and resuming writes them anew."""
    from profcil.runs.reader import load_run, read_alignments

    try:
        return load_run(path).done and bool(read_alignments(path))
    except (ProfcilError, OSError, ValueError, KeyError, TypeError):
        return False
