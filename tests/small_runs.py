"""Tiny runs of three methods on digits: called by tests, and as a program in a tree without the package accel.

python small_runs.py FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

METHODS = ("fedavg", "promax", "prolin")
SETTINGS = {
    "clients": 4,
    "participants": 3,
    "task_size": 5,  # two positions
    "model.width": 4,
    "warmup.rounds": 1,
    "train.rounds": 2,
    "train.epochs": 1,
    "threads": 1,
    "workers": 1,
}


def run_all(folder: Path, accelerate: str) -> None:
    """Runs every method into a folder of its name."""
    from profcil.engine import run
    from profcil.resolve import resolve

    sets = [f"{k}={v}" for k, v in SETTINGS.items()]
    for method in METHODS:
        flags = {"dataset": "digits", "method": method, "accelerate": accelerate}
        run.start(resolve(flags=flags, sets=sets), folder / method, folder)


if __name__ == "__main__":
    assert importlib.util.find_spec("profcil.accel") is None, "this tree has the package accel"
    run_all(Path(sys.argv[1]), "auto")
