"""Finished tiny runs in folders, and the two verbs as a command line would call them."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

from profcil.cli.parser import Parser
from profcil.engine.run import start
from profcil.resolve import resolve

SMALL = ("train.rounds=2", "train.epochs=1", "warmup.rounds=1", "clients=6", "participants=3", "task_size=3")
SIZE = ("model.width=4", "threads=1", "workers=1")


def make_runs(root: Path) -> Path:
    """Two methods with two seeds each in a severe digits stream of three positions."""
    for method in ("fedavg", "promax"):
        for seed in (0, 1):
            flags = {"dataset": "digits", "setting": "severe", "method": method, "seed": seed}
            start(resolve(None, flags, [*SMALL, *SIZE]), root / f"{method}-{seed}", root)
    return root


def unfinish(finished: Path, copy: Path) -> Path:
    """A copy of a run as it was before its last position."""
    shutil.copytree(finished, copy)
    facts, scores = (json.loads((copy / name).read_text()) for name in ("run.json", "scores.json"))
    scores["correct"][-1] = [-1] * len(scores["correct"])
    (copy / "run.json").write_text(json.dumps({**facts, "done": False}))
    (copy / "scores.json").write_text(json.dumps(scores))
    return copy


def command(verb: str, *line: str) -> int:
    module = importlib.import_module(f"profcil.cli.{verb}")
    parser = Parser(prog=f"profcil {verb}", description=module.__doc__)
    module.add(parser)
    return module.run(parser.read(list(line)))
