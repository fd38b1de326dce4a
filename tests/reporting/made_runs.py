"""Tiny finished runs, and a function that calls a command of the command line."""

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
    """Two methods with two seeds each on a severe digits stream of three positions."""
    for method in ("fedavg", "promax"):
        for seed in (0, 1):
            flags = {"dataset": "digits", "setting": "severe", "method": method, "seed": seed}
            start(resolve(None, flags, [*SMALL, *SIZE]), root / f"{method}-{seed}", root)
    return root


def unfinish(finished: Path, copy: Path) -> Path:
    """A copy of a run without its last position."""
    shutil.copytree(finished, copy)
    facts = json.loads((copy / "run.json").read_text())
    scores = json.loads((copy / "scores.json").read_text())
    scores["correct"][-1] = [-1] * len(scores["correct"])
    facts.pop("digests")
    (copy / "run.json").write_text(json.dumps({**facts, "done": False}))
    (copy / "scores.json").write_text(json.dumps(scores))
    return copy


def command(name: str, *arguments: str) -> int:
    """Runs a command without the error handling of `main`."""
    module = importlib.import_module(f"profcil.cli.{name}")
    parser = Parser(prog=f"profcil {name}", description=module.__doc__)
    module.add(parser)
    return module.run(parser.read(list(arguments)))
