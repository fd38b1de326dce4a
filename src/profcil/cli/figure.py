"""Draw one of the paper's figures from run folders, as SVG and PDF.

A folder of runs (a study's) stands for all runs in it. Beside each picture lies NAME.json with the numbers and
settings behind it. Seeds of one method are averaged; a run that is not finished is left out and named.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profcil.cli.parser import Parser, json_flag, print_json


def add(parser: Parser) -> None:
    from profcil.reporting.figures import FIGURES

    parser.epilog = "figures:\n" + "\n".join(f"  {name:<14} {about}" for name, (_, about) in FIGURES.items())
    parser.add_argument("name", metavar="NAME", help="which figure (listed below)")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or folders of runs")
    parser.add_argument("--out", default="figures", metavar="DIR", help="where the files go (figures)")
    parser.add_argument("--format", default="svg,pdf", help="svg, pdf, png or several of them (svg,pdf)")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from profcil.reporting.figures import make
    from profcil.reporting.figures.style import formats_of

    made = make(args.name, args.runs, Path(args.out), formats_of(args.format), tell)
    print_json([str(path) for path in made]) if args.json else print("\n".join(map(str, made)))
    return 0


def tell(sentence: str) -> None:
    print(sentence, file=sys.stderr)
