"""What the README promises of the demo, over five seeds: minutes, so not in the default suite."""

from __future__ import annotations

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
