"""Score the model of a finished run on labelled data: accuracy, per class too, and confusions.

Without --data this is the part of its own data that the run was scored on (test data).

--data is anything that `profcil run --data` reads, of the modality of the model. Columns are found as they were when
the model was trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profcil.cli.parser import Parser, data_dir, json_flag, print_json, reading_flag, with_notes
from profcil.errors import ConfigError

SHOWN = 10  # classes with the lowest accuracy that are printed


def add(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder or model file")
    parser.add_argument("--data", metavar="PATH", help="labelled data (the data that the run was scored on)")
    data_dir(parser)
    parser.add_argument("--none", metavar="PATH", help="also inputs of no class: how well they are separated (AUROC)")
    parser.add_argument("--confusion", metavar="FILE", help="write the confusion matrix as CSV")
    parser.add_argument(
        "--calibrate", action="store_true", help="fit the temperature of probabilities to this data, and keep it"
    )
    reading_flag(parser)
    parser.add_argument("--device", default="cpu", help="torch device: cpu, cuda or cuda:N")
    json_flag(parser)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from profcil.runs.models.evaluation import rejection_auroc, write_calibration, write_confusion
    from profcil.runs.models.labelled_inputs import read_inputs, reading_settings
    from profcil.runs.models.loading import load_model

    if args.calibrate and not args.data:
        raise ConfigError("--calibrate needs data other than the test data of the run; give it with --data PATH")
    model = with_notes(lambda: load_model(args.run, device=args.device))
    found = evaluation_of(args, model)
    if args.calibrate:
        model.temperature = write_calibration(Path(args.run), found)
        found = replace(found, temperature=model.temperature)
    result = found.summary()
    if args.none:
        none = read_inputs(model, [args.none], settings=reading_settings(model, args.set))
        outside = model.probabilities(*none.inputs).cpu()
        result["rejection_auroc"] = rejection_auroc(found.probabilities.amax(1), outside.amax(1))
    if args.confusion:
        write_confusion(Path(args.confusion), found)
    if args.json:
        print_json({**result, "classes": list(found.names), "confusion": found.confusion.tolist()})
    else:
        print("\n".join(lines_of(result)))
    return 0


def evaluation_of(args: argparse.Namespace, model: Any) -> Any:
    """The scores on the data that was given, or on the run's own."""
    from profcil.runs.models.evaluation import evaluate, evaluate_run
    from profcil.runs.models.labelled_inputs import class_ids, read_inputs, reading_settings

    if not args.data:
        return evaluate_run(args.run, Path(args.data_dir) if args.data_dir else None, model)
    given = read_inputs(model, [args.data], labelled=True, settings=reading_settings(model, args.set))
    return evaluate(model, given.inputs, class_ids(model, given.labels, args.data))


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result as text."""
    yield f"accuracy {100 * result['accuracy']:.2f} % of {result['examples']} examples"
    temperature = result["temperature"]
    about = "scores are no log-probabilities" if temperature is None else f"temperature {temperature:.3g}"
    yield f"expected calibration error {100 * result['calibration_error']:.2f} % ({about})"
    if "rejection_auroc" in result:
        yield f"AUROC of known classes against inputs of none: {result['rejection_auroc']:.4f}"
    if len(result["by_support"]) > 1:
        for title, row in result["by_support"].items():
            shares = f"accuracy {100 * row['accuracy']:.1f} %, calibration error {100 * row['calibration_error']:.1f} %"
            yield f"  {row['classes']} classes with {title} training examples: {shares}"
    classes = sorted(result["per_class"].items(), key=lambda item: item[1]["accuracy"])
    for name, row in classes[:SHOWN]:
        yield f"  {name}: {100 * row['accuracy']:.1f} % of {row['examples']}"
    if len(classes) > SHOWN:
        yield f"  and {len(classes) - SHOWN} classes with a higher accuracy (all of them: --json)"
    for row in result["confusions"]:
        yield f"  {row['class']} predicted as {row['predicted']}: {row['times']} times"
