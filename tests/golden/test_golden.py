"""Golden runs: no change of the code changes a bit of a run, unless the change says so by new digests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DIGESTS = json.loads((HERE / "digests.json").read_text())
EXACT = ("weights", "scores", "ledger")
COMPARE = "`make golden-compare BASE=rev` compares two commits on this machine"


def played(path: str, device: str) -> dict[str, Any]:
    """All runs, in a process of their own: the switches of the reference path are read when a process starts."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "golden_runs.py"), "--path", path, "--device", device]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(path: str, device: str) -> None:
    found = played(path, device)
    known = DIGESTS[f"{device} {path}"]
    exact = known.get(found["key"])
    if exact is None:
        for other in known.values():
            check_nearly(found["runs"], other)
        pytest.skip(f"no digests for {found['key']}; {COMPARE}")
    changed = [f"{n}: {k}" for n in sorted(exact) for k in EXACT if found["runs"][n][k] != exact[n][k]]
    assert not changed, f"{COMPARE}; changed: {', '.join(changed)}"
    unrecorded = sorted(found["runs"].keys() - exact.keys())
    if device == "cpu":
        assert not unrecorded
    elif unrecorded:
        warnings.warn(f"no digests on {device} for {', '.join(unrecorded)}; record them", stacklevel=2)


def check_nearly(found: dict[str, Any], known: dict[str, Any]) -> None:
    """What holds on every machine: the bytes sent, and the size of what was learned up to rounding."""
    assert found.keys() == known.keys()
    for name, run in known.items():
        assert found[name]["ledger"] == run["ledger"], name
        assert found[name]["norm"] == pytest.approx(run["norm"], rel=0.05), name


@pytest.mark.parametrize("path", ["reference", "default"])
def test_runs_on_a_cpu_keep_their_bits(path: str) -> None:
    check(path, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["reference", "default"])
def test_runs_on_a_gpu_keep_their_bits(path: str) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    check(path, "cuda")
