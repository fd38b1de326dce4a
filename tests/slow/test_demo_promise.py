"""What the README promises of the demo, over five seeds: minutes, so not in the default suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from profcil.engine.run import start
from profcil.reporting.tables import compare
from profcil.resolve import resolve
from profcil.runs.reader import load_run

pytestmark = pytest.mark.slow


def test_promax_is_clearly_ahead_of_fedavg_on_digits(tmp_path: Path) -> None:
    paths = [
        start(resolve("digits-severe", {"method": m, "seed": s}), tmp_path / f"{m}{s}", tmp_path)
        for m in ("fedavg", "promax")
        for s in range(5)
    ]
    rows = compare([load_run(path) for path in paths])
    means = {
        m: {k: fmean(r[k] for r in rows if r["method"] == m) for k in ("faa", "af", "norm_comm")}
        for m in ("fedavg", "promax")
    }
    assert means["promax"]["faa"] > means["fedavg"]["faa"] + 40
    assert means["promax"]["af"] < means["fedavg"]["af"] - 15
    assert means["promax"]["norm_comm"] < 0.5


def test_the_demo_ends_with_three_predictions(tmp_path: Path) -> None:
    """The lines of the Makefile, as a shell runs them."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    recipe = makefile.partition("\ndemo:")[2].partition("\n\n")[0].splitlines()[1:]
    lines = [
        line.strip().replace("$(BIN)/profcil", f"{sys.executable} -m profcil").replace("$$", "$") for line in recipe
    ]
    env = {**os.environ, "PROFCIL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(["sh", "-ec", "\n".join(lines)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    predicted = [line.split("\t") for line in done.stdout.splitlines()[-3:]]
    assert [answer.split()[0] for _, answer in predicted] == [Path(file).parent.name for file, _ in predicted]
