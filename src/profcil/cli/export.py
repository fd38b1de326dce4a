"""Export the model of a finished run: as ONNX, from raw tensors to probabilities, or as its own safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from profcil.cli.parser import Parser, with_notes
from profcil.errors import ConfigError


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder or model file")
    parser.add_argument("--onnx", metavar="FILE", help="write ONNX (needs the extra `export`)")
    parser.add_argument("--safetensors", metavar="FILE", help="write the model file, which `profcil.load_model` reads")


def run(args: argparse.Namespace) -> int:
    if not args.onnx and not args.safetensors:
        raise ConfigError("export needs a format; give --onnx FILE or --safetensors FILE")
    from profcil.runs.models.export import export_file, export_onnx
    from profcil.runs.models.loading import load_model

    if args.safetensors:
        export_file(Path(args.run), Path(args.safetensors))
        print(f"wrote {args.safetensors}")
    if args.onnx:
        export_onnx(with_notes(lambda: load_model(args.run)), Path(args.onnx))
        print(f"wrote {args.onnx}")
    return 0
