"""FedAvg on digits here and in another framework: the same network, clients, batches, epochs and averages.

The framework may need versions of its own, so its rounds are computed by a script (`rounds.py`) in any Python that has
it (`--peer-python`). The row has the seconds a round of both, the accuracy of both final models, and the largest
difference between their weights: equal up to rounding if the work was the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from profcil.bench.flower import run_here, setup
from profcil.bench.peers.export import accuracy, export, to_plain
from profcil.deploy.local.cluster import FLOWER_ENVIRONMENT
from profcil.model.net import Tensors

SCRIPT = Path(__file__).with_name("rounds.py")
NEEDS = {"pfl": "pfl torch", "flower": "'flwr[simulation]' torch"}  # what pip installs
NAMES = {"pfl": "pfl-research", "flower": "Flower's simulation engine"}
REPEATS = 3  # of both in turn, so that a load on the machine affects both


def case(framework: str, python: str = "", sets: tuple[str, ...] = (), repeats: int = REPEATS) -> dict[str, Any]:
    """Seconds a round of both, the best of some repetitions in turn."""
    sets = ("setting=homogeneous", "train.augment=false", *sets)
    mine = []
    theirs = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        export(*setup(sets, 0), work)
        for number in range(repeats):
            found = run_peer(framework, python or sys.executable, work, Path(folder) / f"end-{number}.npz")
            if isinstance(found, str):
                return {"note": found}
            theirs.append(found)
            mine.append(run_here(sets))
        seconds = {"ours": min(s for s, _ in mine), "unit": "s a round", "reference": min(s for s, _ in theirs)}
        return seconds | {"against": NAMES[framework], **same_work(to_plain(mine[0][1]), theirs[0][1], work)}


def same_work(model: Tensors, other: Tensors, work: Path) -> dict[str, Any]:
    """The accuracy of both final models, and how far apart their weights are."""
    largest = max(float((tensor - other[name]).abs().max()) for name, tensor in model.items())
    found = {"accuracy": accuracy(model, work), "reference_accuracy": accuracy(other, work)}
    return found | {"largest_difference": largest}


def run_peer(framework: str, python: str, work: Path, end: Path) -> tuple[float, Tensors] | str:
    """Seconds a round and the final model, or why there are none. One thread a process is faster for both."""
    env = {**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(end.parent), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(SCRIPT.parent)  # of Ray's actors, which import the script
    command = [python, str(SCRIPT), framework, str(work), str(end)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    except OSError as error:
        return f"{python} cannot be run ({error.strerror}); name a Python with --peer-python PATH"
    if done.returncode or not end.exists():
        return why_not(framework, done.stderr)
    with np.load(end) as arrays:
        model = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    seconds = next(json.loads(line)["seconds"] for line in done.stdout.splitlines() if line.startswith('{"seconds"'))
    return seconds, model


def why_not(framework: str, errors: str) -> str:
    """What a script that failed has said, and what to do where a module is missing."""
    last = (errors.strip().splitlines() or ["no message"])[-1]
    if "ModuleNotFoundError" not in last:
        return f"{NAMES[framework]} failed ({last})"
    lacking = last.partition(": ")[2]
    return (
        f"{NAMES[framework]} cannot be compared ({lacking}); make a virtual environment, run `pip install "
        f"{NEEDS[framework]}` in it, and give its python by --peer-python PATH"
    )
