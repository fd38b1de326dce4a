"""Predict the classes of new inputs with the model of a finished run; no training data is needed.

Inputs by the model's modality: image files or folders; texts, .txt files with one text per line, or - for standard
input; a folder with nodes.csv and edges.csv; and for texts and tables whatever `profcil run --data` reads, with the
columns of the data that the model was trained on.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from profcil.cli.parser import Parser, json_flag, print_json, reading_flag, with_notes
from profcil.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from profcil.runs.models.labelled_inputs import GivenInputs
    from profcil.runs.models.trained_model import Model

NONE = "none of these"


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder or model file")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="images, texts, tables or a graph folder")
    parser.add_argument("--top", default="1", metavar="N", help="show the N most probable classes (1)")
    parser.add_argument("--reject", default="0", metavar="T", help=f"say '{NONE}' below this probability (0)")
    reading_flag(parser)
    parser.add_argument("--nodes", metavar="IDS", help="graphs: ids of the nodes to predict, with commas (all)")
    parser.add_argument("--device", default="cpu", help="torch device: cpu, cuda or cuda:N")
    parser.add_argument("--csv", action="store_true", help="print CSV: input, class, probability, rank")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    top = whole_number("--top", args.top)
    threshold = share("--reject", args.reject)
    if args.json and args.csv:
        raise ConfigError("--json and --csv exclude each other; choose one")
    from profcil.runs.models.labelled_inputs import choose_nodes, read_inputs, reading_settings
    from profcil.runs.models.loading import load_model

    model = with_notes(lambda: load_model(args.run, device=args.device))
    given = read_inputs(model, args.inputs, settings=reading_settings(model, args.set))
    if args.nodes:
        if model.modality != "graph":
            raise ConfigError("--nodes is for models of graphs; leave it out")
        given = choose_nodes(given, args.nodes.split(","))
    rows = predictions(model, given, top, threshold)
    print_json(rows) if args.json else print(csv_text(rows) if args.csv else plain_text(rows))
    return 0


def whole_number(flag: str, text: str) -> int:
    """The value of a flag that counts from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{flag} {text} is not possible; give a whole number of at least 1")
    return int(text)


def share(flag: str, text: str) -> float:
    """The value of a flag from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{flag} {text} is not possible; give a number from 0 to 1")
    return value


def predictions(model: Model, given: GivenInputs, top: int, threshold: float) -> list[dict[str, Any]]:
    """For each input the most probable classes, and whether it is rejected."""
    probabilities = model.probabilities(*given.inputs).cpu()
    best = probabilities.topk(min(top, len(model.seen)), 1)
    rows = []
    for name, values, ids in zip(given.names, best.values, best.indices, strict=True):
        rejected = float(values[0]) < threshold
        rows.append({"input": name, "rejected": rejected, "classes": named(model, values, ids)})
    return rows


def named(model: Model, values: Tensor, ids: Tensor) -> list[dict[str, Any]]:
    """Classes and their probabilities, falling."""
    pairs = zip(values.tolist(), ids.tolist(), strict=True)
    return [{"class": model.names[i], "probability": round(value, 6)} for value, i in pairs]


def plain_text(rows: list[dict[str, Any]]) -> str:
    """One line per input: the input, then class and probability of each of its best classes."""
    lines = []
    for row in rows:
        cells = [f"{found['class']} {found['probability']:.3f}" for found in row["classes"]]
        if row["rejected"]:
            cells = [f"{NONE} ({cells[0]})"]
        lines.append("\t".join([row["input"], *cells]))
    return "\n".join(lines)


def csv_text(rows: list[dict[str, Any]]) -> str:
    """One line per input and class. The class of a rejected input is empty."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["input", "class", "probability", "rank"])
    for row in rows:
        for rank, found in enumerate(row["classes"], start=1):
            name = "" if row["rejected"] else found["class"]
            writer.writerow([row["input"], name, found["probability"], rank])
    return text.getvalue().rstrip("\n")
