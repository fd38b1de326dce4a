"""Draw a figure of the paper from run folders, as SVG and PDF.

A folder of runs (a study's) stands for all runs in it, a results store or one of its CSV files for its rows. NAME.json,
written beside the figure, has the numbers and settings behind it. Seeds of one method are averaged. Unfinished runs are
left out with a message.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json, print_warning


def add(parser: Parser) -> None:
    from profcil.reporting.figures import FIGURES

    parser.epilog = "figures:\n" + "\n".join(f"  {name:<14} {about}" for name, (_, about) in FIGURES.items())
    parser.add_argument("name", metavar="NAME", help="which figure (listed below)")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, folders of runs, or results stores")
    parser.add_argument("--out", default="figures", metavar="DIR", help="folder to write to (figures)")
    parser.add_argument("--format", default="svg,pdf", help="svg, pdf, png or several of them (svg,pdf)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.figures import make_figure
    from profcil.reporting.figures.style import parse_formats

    written = make_figure(args.name, args.runs, Path(args.out), parse_formats(args.format), print_warning)
    paths = [str(path) for path in written]
    if args.json:
        print_json(paths)
    else:
        print("\n".join(paths))
    return 0
